"""The damage that hostile or careless clients can do: memory, stalls, fairness and journal size.

    python -m bench.hostile [--quick]

The parts `hostile_memory`, `hostile_stalls` and `hostile_journal` also run alone. --quick uses a
hundredth of the requests and rows.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import hostile_journal, hostile_memory, hostile_stalls
from bench.harness import emit
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller.bounds import queue_of
from skyrl_actors.messages.errors import CapacityError

KEYS = 3


@dataclass(frozen=True)
class Row:
    what: str
    found: str
    wanted: str
    holds: bool


def shares() -> dict[str, Any]:
    """Return the open requests of three keys, if each takes all that it can before the next."""
    limits = LimitsConfig()
    queue = queue_of(limits)
    got = []
    for key in range(KEYS):
        count = 0
        try:
            while True:
                queue.reserve(f"r{key}x{count}0k{key:010x}", "s", None, 0, None)
                count += 1
        except CapacityError:
            got.append(count)
    return {"open_requests": limits.open_requests, "open_requests_of_keys": got}


def rows(found: dict[str, Any]) -> list[Row]:
    memory, stalls, journal = found["memory"], found["stalls"], found["journal"]
    grown = {
        name: memory[f"{name}_rss_mib"] - memory["calm_rss_mib"] for name in ("queued", "unread")
    }
    budget = memory["budget_mib"]
    heartbeat, ratio = stalls["attacked"]["heartbeat_ms_p99"], stalls["forward_backward_ratio"]
    stall_ms = max(journal["idle_stall_ms"], journal["due_stall_ms"])
    in_memory_ms = journal["memory_stall_ms"]
    third = found["shares"]["open_requests_of_keys"][-1]
    return [
        Row(
            f"memory for {memory['requests']} queued requests of {memory['request_mib']} MiB",
            f"{grown['queued']} MiB",
            f"{budget} MiB",
            grown["queued"] <= budget,
        ),
        Row(
            f"memory with {memory['readers']} readers that do not read",
            f"{grown['unread']} MiB",
            f"{budget} MiB",
            grown["unread"] <= budget,
        ),
        Row(
            "heartbeat of one key while another attacks, 99 %",
            f"{heartbeat} ms",
            "100 ms",
            heartbeat < 100,
        ),
        Row("its small forward_backward, median over calm", f"{ratio} x", "3 x", ratio < 3),
        Row("open requests that remain for a third key", str(third), "1", third >= 1),
        Row(
            f"restart with {journal['samples']} answered samples",
            f"{journal['restart_s']} s",
            "2 s",
            journal["restart_s"] < 2,
        ),
        Row(
            "longest stall of a write during a sweep, journal in memory",
            f"{in_memory_ms} ms",
            "50 ms",
            in_memory_ms < 50,
        ),
        Row(
            "longest stall of a write during a sweep, journal on this disk",
            f"{stall_ms} ms beside an fsync of {journal['due_disk_ms_longest']} ms",
            "50 ms",
            stall_ms < 50,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    found = {
        "shares": shares(),
        "journal": hostile_journal.run(10_000 if quick else 1_000_000),
        "memory": hostile_memory.run(100 if quick else 10_000),
        "stalls": hostile_stalls.run(5.0 if quick else 20.0),
    }
    table = Table("", "found", "bound", "")
    for row in rows(found):
        table.add_row(row.what, row.found, row.wanted, "holds" if row.holds else "DOES NOT HOLD")
    Console().print(table)
    emit("hostile", {"quick": quick, **found})


if __name__ == "__main__":
    main()
