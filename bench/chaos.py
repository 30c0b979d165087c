"""Kill random processes of a service with SIGKILL while SDK loops train.

    python -m bench.chaos --kills 100

The client must see no exception, and the final weights and moments must equal those of an
undisturbed run. The result contains p50 and p99 of the time from a kill to the next answer of each
loop, by killed process.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import httpx
import tinker

from bench import faults, harness
from bench.loops import LOOPS, Answers, difference, digest, tensors_of
from bench.nodes import TwoNodes

MACHINE_EVERY, NODE_EVERY = 40, 25
FIRST_ANSWERS = 8
LONGEST_S = 60.0
HEALTHY_S = 240.0  # an engine starts in 30 s, or in 100 s on a busy machine
OVERLAPPING = "during another's recovery"
ENGINE_KINDS = ("engine actor", "vLLM process")


class Run:
    """The loops in threads, each for its number of steps or until `enough` is set."""

    def __init__(self, name: str, steps: dict[str, int] | None = None):
        self.enough = threading.Event()
        self.answers = {loop: Answers() for loop in LOOPS}
        self.steps: dict[str, int] = {}
        self.paths: dict[str, list[str]] = {}
        self.errors: list[str] = []
        self._wanted = steps
        self._threads = [
            # daemons, because after Ctrl-C the SDK still repeats calls of a service that is gone
            threading.Thread(target=self._loop, args=(loop, name), name=loop, daemon=True)
            for loop in LOOPS
        ]

    def _loop(self, loop: str, name: str) -> None:
        wanted = self._wanted
        try:
            with tinker.ServiceClient() as service:
                self.steps[loop], self.paths[loop] = LOOPS[loop](
                    service,
                    name,
                    lambda step: step >= wanted[loop] if wanted else self.enough.is_set(),
                    self.answers[loop],
                )
        except BaseException:  # noqa: BLE001  any error of the client is a result
            self.errors.append(f"{loop}: {traceback.format_exc()}")
            self.enough.set()

    def start(self) -> "Run":
        for thread in self._threads:
            thread.start()
        return self

    def join(self) -> "Run":
        for thread in self._threads:
            thread.join()
        return self


def healthy(timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{harness.PORT}/healthz", timeout=2).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    return False


def killer(
    run: Run, kills: int, seed: int, kinds: tuple[str, ...], served: harness.Served
) -> list[dict[str, Any]]:
    """Kill processes of all kinds, in random order. Return kind and time of each kill.

    Usually the service recovers before the next kill, and sometimes it does not. Every
    `MACHINE_EVERY`th kill is a power cut: all processes at once, and the contents of shared memory.
    Every `NODE_EVERY`th is the worker node with all ranks and engines, which restarts empty.
    """
    choice, made = random.Random(seed), []
    while (
        any(len(a.times) < FIRST_ANSWERS for a in run.answers.values()) and not run.enough.is_set()
    ):
        time.sleep(0.1)  # the start of a client is not a recovery
    while len(made) < kills and not run.enough.is_set():
        # each round kills one of the two, because vLLM starts as slowly as all others together
        spared = choice.choice(ENGINE_KINDS)
        for drawn in choice.sample(kinds, len(kinds)):
            if drawn == spared and len(kinds) > 1:
                continue
            count = len(made) + 1
            kind = (
                "machine"
                if count % MACHINE_EVERY == 0
                else "worker node"
                if count % NODE_EVERY == 0
                else drawn
            )
            time.sleep(choice.uniform(0.2, 2.5))
            calm = healthy(0.1)
            moment = time.time()
            if kind == "machine":
                killed = faults.power_cut(harness.NAME)
                served.serve()
            elif kind == "worker node":
                assert served.nodes is not None
                killed = served.nodes.kill_node()
            else:
                killed = len(faults.kill(harness.NAME, kind, choice))
            if killed and not run.enough.is_set():
                made.append({"kind": kind, "at": moment, "processes": killed, "alone": calm})
                print(f"kill {len(made):3d}/{kills}: {kind}", flush=True)
            if choice.random() < 0.85 and not healthy(HEALTHY_S):
                run.errors.append(f"not healthy {HEALTHY_S:.0f} s after the kill of {kind}")
                run.enough.set()
            if len(made) >= kills:
                break
    return made


def recovery(run: Run, made: list[dict[str, Any]]) -> dict[str, Any]:
    """Return quantiles of recovery times by kind of kill.

    They are the seconds from a kill to the next answer of each loop, and the longest wait between
    two answers until the next kill. Kills during another's recovery are a separate kind.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    counts: dict[str, int] = {}
    for entry, following in zip(made, [*made[1:], {"at": made[-1]["at"] + LONGEST_S}], strict=True):
        waits = {
            loop: answers.after(entry["at"], following["at"])
            for loop, answers in run.answers.items()
        }
        alone = entry["alone"] and all(
            entry["at"] + seconds <= following["at"] for seconds, _ in waits.values()
        )
        kind = entry["kind"] if alone else OVERLAPPING
        counts[kind] = counts.get(kind, 0) + 1
        found.setdefault(kind, []).extend(waits.values())
        text = "  ".join(
            f"{loop} {seconds:.1f} ({longest:.1f}) s" for loop, (seconds, longest) in waits.items()
        )
        when = time.strftime("%H:%M:%S", time.localtime(entry["at"]))
        print(f"{when}  {entry['kind']:16}{'' if alone else OVERLAPPING:28}  {text}", flush=True)
    return {
        kind: {
            "kills": counts[kind],
            **quantiles([w[0] for w in pairs]),
            "longest_wait": quantiles([w[1] for w in pairs]),
        }
        for kind, pairs in found.items()
    }


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50_s": round(statistics.median(ordered), 2),
        "p99_s": round(ordered[max(0, -(-99 * len(ordered) // 100) - 1)], 2),
    }


def compare(a: Run, b: Run, checkpoints: Path) -> dict[str, Any]:
    equal, largest = True, 0.0
    for loop in LOOPS:
        for one, other in zip(a.paths[loop], b.paths[loop], strict=True):
            left, right = tensors_of(checkpoints, one), tensors_of(checkpoints, other)
            equal &= digest(left) == digest(right)
            largest = max(largest, difference(left, right))
    return {"bitwise_equal": equal, "largest_difference": largest}


def chaos(
    kills: int, seed: int, kinds: tuple[str, ...], scratch: Path, config: str
) -> dict[str, Any]:
    checkpoints = scratch / "checkpoints"
    # makes a replay bitwise comparable
    alone = (
        "policy.share_passes=false",
        "critic.share_passes=false",
    )
    options = (f"checkpoint_dir={checkpoints}", *alone)
    with harness.service(*options, config=config, nodes=TwoNodes) as served:
        started = time.time()
        disturbed = Run("disturbed").start()
        made = killer(disturbed, kills, seed, kinds, served)
        disturbed.enough.set()
        disturbed.join()
        seconds = time.time() - started
        if disturbed.errors:
            raise SystemExit("the client got exceptions:\n" + "\n".join(disturbed.errors))
        healthy(HEALTHY_S)
        calm = Run("calm", disturbed.steps).start().join()
        if calm.errors:
            raise SystemExit("the undisturbed run failed:\n" + "\n".join(calm.errors))
        times = recovery(disturbed, made)
    return {
        "config": config,
        "kills": len(made),
        "seconds": round(seconds),
        "steps": disturbed.steps,
        "client_exceptions": 0,
        **compare(disturbed, calm, checkpoints),
        "recovery_by_process_killed": times,
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=faults.KINDS, default=list(faults.KINDS))
    parser.add_argument("--config", default="configs/cpu_tiny.yaml")
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        result = chaos(
            options.kills, options.seed, tuple(options.kinds), Path(scratch), options.config
        )
    harness.emit("chaos", result)
    sys.exit(
        0
        if result["largest_difference"] <= 1e-6
        else "the weights differ from the undisturbed run's"
    )


if __name__ == "__main__":
    main()
