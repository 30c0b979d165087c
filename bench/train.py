"""The cost of forward_backward: plain torch loops, a worker, and a worker behind SDK and service.

    python -m bench.train                        # all; about 15 minutes on two cores
    python -m bench.train --only ragged,combined

One run measures all, and its result is one JSON line. Ratios are medians of alternating rounds. A
ratio above 1 is faster than the plain loop. Losses are compared too, to prove that all compute the
same.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import emit
from bench.train_setup import (
    THREADS,
    base_of,
    columns_of,
    compute,
    peak_of,
    plain_loop,
    plain_model,
    ragged,
    rows_of,
    seconds,
    side_by_side,
    tenants,
    tokens_in,
    worker_of,
)
from skyrl_actors.messages.model import ModelSpec

ROUNDS = 5


def ratio(found: dict[str, list[float]], ours: str, theirs: str) -> float:
    return round(statistics.median(found[theirs]) / statistics.median(found[ours]), 3)


def rates(found: dict[str, list[float]], tokens: int) -> dict[str, int]:
    return {
        f"{name}_tokens_per_s": round(tokens / statistics.median(values))
        for name, values in found.items()
    }


def same(a: float, b: float) -> None:
    assert abs(a - b) <= 1e-4 * abs(b), f"losses differ: {a} and {b}"


def _full_model(lengths_of: Callable[[int], Sequence[int]], name: str) -> dict[str, Any]:
    with base_of() as base:
        plain, worker = plain_model(base), worker_of(base)
        worker.create_model(ModelSpec(model_id="full", base_model="m50"))
        data = [rows_of(i, lengths_of(7)) for i in range(ROUNDS + 1)]
        columns = [columns_of(rows) for rows in data]
        same(compute(worker, [("full", columns[0])]), plain_loop(plain, data[0], 4))
        found = side_by_side(
            {
                "padded": lambda i: plain_loop(plain, data[i], 4),
                "one_by_one": lambda i: plain_loop(plain, data[i], 1),
                "worker": lambda i: compute(worker, [("full", columns[i])]),
            },
            ROUNDS,
        )
    return {
        f"{name}_ratio": ratio(found, "worker", "padded"),
        f"{name}_one_by_one_ratio": ratio(found, "worker", "one_by_one"),
        f"{name}": rates(found, tokens_in(data[1])),
    }


def uniform() -> dict[str, Any]:
    return _full_model(lambda seed: [256] * 8, "uniform")


def ragged_lengths() -> dict[str, Any]:
    return _full_model(ragged, "ragged")


def _many(lengths: Sequence[Sequence[int]], name: str, rounds: int) -> dict[str, Any]:
    with base_of() as base:
        worker = worker_of(base)
        names = tenants(worker, len(lengths))
        parts = [
            (tenant, columns_of(rows_of(i, own)))
            for i, (tenant, own) in enumerate(zip(names, lengths, strict=True))
        ]
        same(compute(worker, parts), sum(compute(worker, [part]) for part in parts))
        found = side_by_side(
            {
                "together": lambda i: compute(worker, parts),
                "alone": lambda i: [compute(worker, [part]) for part in parts],
            },
            rounds,
        )
    tokens = sum(columns.num_tokens for _, columns in parts)
    return {
        f"{name}_ratio": ratio(found, "together", "alone"),
        name: {"tokens": tokens, **rates(found, tokens)},
    }


def tenants8() -> dict[str, Any]:
    """Measure 8 tenants with one sequence of 16 to 32 tokens each."""
    return _many(
        [[length] for length in np.linspace(16, 32, 8).astype(int)], "tenants8", 3 * ROUNDS
    )


def tenants8_large() -> dict[str, Any]:
    return _many([[256, 128] for _ in range(8)], "tenants8_large", ROUNDS)


def logits_memory() -> dict[str, Any]:
    """Measure the peak memory of a loss over 4096 tokens and a vocabulary of 151,936.

    It covers forward and backward, each way in a separate process.
    """
    peaks = {way: _in_process(f"head-{way}") for way in ("full", "chunked")}
    return {
        "logits_memory_ratio": round(peaks["chunked"]["peak"] / peaks["full"]["peak"], 4),
        "logits_memory": {way: round(found["peak"] / 2**20) for way, found in peaks.items()}
        | {"unit": "MiB"},
        "logits_time_ratio": round(peaks["full"]["seconds"] / peaks["chunked"]["seconds"], 3),
    }


def combined() -> dict[str, Any]:
    """Compare peft with one packed pass, for 4 LoRA tenants over 8 layers and a large vocabulary.

    peft pads, computes full logits and runs one tenant after the other. Speed and memory are
    measured in separate processes, three times alternately. Half of the tokens are prompts.
    `scored` also returns their logprobs, which is the default of a service; the others do not
    (score_uncounted=false).
    """
    rounds = [
        {way: _in_process(f"combined-{way}") for way in ("peft", "worker", "bfloat16", "scored")}
        for _ in range(3)
    ]
    middle = {way: statistics.median(r[way]["seconds"] for r in rounds) for way in rounds[0]}
    memory = {way: statistics.median(r[way]["peak"] for r in rounds) for way in rounds[0]}
    tokens = rounds[0]["peft"]["tokens"]
    same(rounds[0]["worker"]["loss"], rounds[0]["peft"]["loss"])
    return {
        "combined_ratio": round(middle["peft"] / middle["worker"], 3),
        "combined_scored_ratio": round(middle["peft"] / middle["scored"], 3),
        "combined_bfloat16_ratio": round(middle["peft"] / middle["bfloat16"], 3),
        "combined_memory_ratio": round(memory["worker"] / memory["peft"], 3),
        "combined": {
            way: {
                "tokens_per_s": round(tokens / middle[way]),
                "extra_mib": round(memory[way] / 2**20),
            }
            for way in middle
        },
    }


def sharded_tenants() -> dict[str, Any]:
    """Measure 4 tenants in one pass and one at a time.

    FSDP2 shards the base over two ranks. A rank has about 360 tokens.
    """
    from bench.train_ranks import time_tenants
    from tests.workers.ranks import Ranks

    with base_of() as base:
        pool = Ranks(2, 600.0)
        try:
            found = {
                kind: pool.run(time_tenants, str(base), kind, ROUNDS)[0]
                for kind in ("fsdp2", "replica")
            }
        finally:
            pool.close()
    return {
        "sharded_tenants_ratio": ratio(found["fsdp2"], "together", "alone"),
        "replica_tenants_ratio": ratio(found["replica"], "together", "alone"),
    }


def service() -> dict[str, Any]:
    from bench.train_service import compare

    with base_of() as base:
        return compare(base, ROUNDS)


def trl() -> dict[str, Any]:
    if find_spec("trl") is None:
        raise SystemExit(
            "trl is not installed; pip install '.[bench]', or leave this part out with --only"
        )
    from bench.train_trl import compare

    with base_of() as base:
        return compare(base, ROUNDS)


def growth() -> dict[str, Any]:
    """Measure the seconds of one call as it grows.

    It grows in tokens of one adapter (rows of 512), in tenants with 64 tokens each, and in ranks of
    one thread (rows of 128, 2048 tokens). The milliseconds to create and to delete a tenant are
    measured too.
    """
    with base_of() as base:
        ranks = {count: _seconds_on_ranks(base, count) for count in (1, 2)}
        worker = worker_of(base)
        made = statistics.median(seconds(lambda: tenants(worker, 1)) for _ in range(9))
        deleted = statistics.median(_deleted(worker) for _ in range(9))
        names = tenants(worker, 64)
        tokens = {
            count: _timed(worker, [(names[0], [512] * (count // 512))])
            for count in (1024, 4096, 16384, 65536)
        }
        many = {
            count: _timed(worker, [(name, [64]) for name in names[:count]])
            for count in (1, 4, 16, 64)
        }
    return {
        "growth": {
            "seconds_by_tokens": tokens,
            "seconds_by_tenants": many,
            "seconds_by_ranks": ranks,
        },
        "tenant_ms": {"create": round(made * 1000, 1), "delete": round(deleted * 1000, 3)},
    }


def _deleted(worker: Any) -> float:
    (name,) = tenants(worker, 1)
    return seconds(lambda: worker.delete_model(name))


def _seconds_on_ranks(base: Path, count: int) -> float:
    from bench.train_ranks import time_rows
    from tests.workers.ranks import Ranks

    pool = Ranks(count, 600.0)
    try:
        return round(min(pool.run(time_rows, str(base), 3)[0]), 3)
    finally:
        pool.close()


def _timed(worker: Any, parts: Sequence[tuple[str, Sequence[int]]]) -> float:
    data = [(name, columns_of(rows_of(1, lengths))) for name, lengths in parts]
    return round(min(side_by_side({"all": lambda i: compute(worker, data)}, 2)["all"]), 3)


def _in_process(case: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.train", "--case", case],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run_case(case: str) -> dict[str, Any]:
    from bench.train_cases import CASES

    torch.set_num_threads(THREADS)
    work = CASES[case]()
    found: dict[str, Any] = {}
    peak = peak_of(lambda: found.update(work()))
    return {"peak": peak, **found}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": uniform,
    "ragged": ragged_lengths,
    "tenants8": tenants8,
    "tenants8_large": tenants8_large,
    "logits_memory": logits_memory,
    "combined": combined,
    "sharded_tenants": sharded_tenants,
    "service": service,
    "trl": trl,
    "growth": growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default=",".join(name for name in PARTS if name != "trl" or find_spec("trl")),
        help=f"comma-separated names of {', '.join(PARTS)}",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case)))
        return
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {}
    for name in options.only.split(","):
        if name not in PARTS:
            raise SystemExit(f"unknown part {name!r}; use {', '.join(PARTS)}")
        print(f"{name} …", file=sys.stderr, flush=True)
        result |= PARTS[name]()
    emit("train", result | {"threads": THREADS, "rounds": ROUNDS})


if __name__ == "__main__":
    main()
