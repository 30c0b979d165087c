"""Passes that JAX compiles beside torch's: the same calls of two workers, in turns, on the CPU.

    python -m bench.jax_passes [--case NAME ...] [--rounds N]

Cases: `tiny` (64 rows of 20 to 48 tokens on the tiny model's sizes), `uniform` and `ragged` (rows
of 256, and of 32 to 512, on 50 million weights), `tenants` (eight adapters with two rows each),
`full` (a full fine-tune on ragged rows), `experts` and `experts of two` (eight rows of 256 of one
adapter or of two, on the mixture of `bench.moe`). Each is a forward and backward in float32. Then
thousand calls of several kinds are planned, to count programs and padding; nothing is computed for
that.

Prints a table of medians, and one JSON line.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "2")

import numpy as np
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from bench import train_setup
from bench.harness import emit
from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.plans import layout_of, plan_passes, slots_of
from skyrl_actors.jax_workers.worker import JaxWorker
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.workers.torch_worker import TorchWorker

TINY = Qwen3Config(
    vocab_size=320,
    hidden_size=192,
    intermediate_size=640,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=None,
)
WIDE = train_setup.config_of(512, 16)
MIXTURE = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=64,
    max_position_embeddings=512,
)
BUDGET = 4096
FULL = 0
# The model, the number of adapters (FULL: a full fine-tune), and the lengths of each model's rows.
CASES: dict[str, tuple[PreTrainedConfig, int, Callable[[int], list[int]]]] = {
    "tiny": (TINY, 1, lambda seed: np.random.default_rng(seed).integers(20, 48, 64).tolist()),
    "uniform": (WIDE, 1, lambda seed: [256] * 8),
    "ragged": (WIDE, 1, train_setup.ragged),
    "tenants": (WIDE, 8, lambda seed: train_setup.ragged(seed, 2)),
    "full": (WIDE, FULL, train_setup.ragged),
    "experts": (MIXTURE, 1, lambda seed: [256] * 8),
    "experts of two": (MIXTURE, 2, lambda seed: [256] * 4),
}


Workers = dict[str, tuple[TorchWorker, list[str]]]


@contextmanager
def workers(config: PreTrainedConfig, adapters: int) -> Iterator[Workers]:
    """Yield a worker of each library, and the names of its models."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-jax-") as cache,
        train_setup.folder_of(config) as base,
    ):
        strategy = JaxStrategy(cache=Path(cache), prepare_s=0)
        made = {
            "torch": train_setup.worker_of(base, BUDGET),
            "jax": train_setup.worker_of(
                base, BUDGET, JaxWorker, strategy=strategy, full_strategy=strategy
            ),
        }
        found: Workers = {}
        for name, worker in made.items():
            if adapters:
                found[name] = worker, train_setup.tenants(worker, adapters, unembed=True)
            else:
                worker.create_model(ModelSpec(model_id="full", base_model="m50", seed=1))
                found[name] = worker, ["full"]
        yield found


def measured(name: str, rounds: int) -> dict[str, Any]:
    config, adapters, lengths_of = CASES[name]
    vocab = int(config.vocab_size or 0)
    with workers(config, adapters) as ways:

        def work_of(way: str) -> Callable[[int], float]:
            worker, names = ways[way]

            def work(_: int) -> float:
                data = [
                    train_setup.columns_of(train_setup.rows_of(i, lengths_of(i), vocab))
                    for i in range(len(names))
                ]
                return train_setup.compute(worker, list(zip(names, data, strict=True)))

            return work

        first = {way: train_setup.seconds(lambda way=way: work_of(way)(0)) for way in ways}
        losses = {way: work_of(way)(0) for way in ways}
        assert abs(losses["jax"] - losses["torch"]) < 1e-4 * abs(losses["torch"]), losses
        found = train_setup.side_by_side({way: work_of(way) for way in ways}, rounds)
        counters = ways["jax"][0].paths()["programs"]
    tokens = sum(sum(lengths_of(i)) for i in range(max(1, adapters)))
    ratios = [torch / jax for torch, jax in zip(found["torch"], found["jax"], strict=True)]
    medians = {way: statistics.median(times) for way, times in found.items()}
    return {
        "case": name,
        "tokens": tokens,
        "tokens_per_s": {way: tokens / each for way, each in medians.items()},
        "against_torch": statistics.median(ratios),
        "first_call_s": first,
        "programs": counters,
    }


def log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(int).tolist()


LOADS: dict[str, Callable[[np.random.Generator], list[list[int]]]] = {
    "one tenant, 1 to 64 rows of 32 to 512": lambda rng: [
        log_uniform(rng, 32, 512, int(rng.integers(1, 65)))
    ],
    "1 to 8 tenants, 1 to 16 rows of 32 to 512": lambda rng: [
        log_uniform(rng, 32, 512, int(rng.integers(1, 17))) for _ in range(rng.integers(1, 9))
    ],
    "1 to 8 tenants, 1 to 16 rows of 32 to 2048": lambda rng: [
        log_uniform(rng, 32, 2048, int(rng.integers(1, 17))) for _ in range(rng.integers(1, 9))
    ],
    "groups of RL: 8 prompts x 8 answers, 64 to 1024": lambda rng: [
        (np.repeat(log_uniform(rng, 20, 200, 8), 8) + rng.integers(44, 800, 64)).tolist()
    ],
    "1 to 8 tenants, one row of 16 to 32": lambda rng: [
        log_uniform(rng, 16, 32, 1) for _ in range(rng.integers(1, 9))
    ],
}


def planned(name: str, calls: int = 1000) -> dict[str, Any]:
    """Count the shapes of programs, and the share of padding, of so many calls."""
    rng = np.random.default_rng(0)
    shapes: set[tuple[int, int, int]] = set()
    tokens = computed = passes = 0
    for _ in range(calls):
        parts = LOADS[name](rng)
        tokens += sum(map(sum, parts))
        lengths = [(range(len(own)), np.asarray(own)) for own in parts]
        for plan in plan_passes(lengths, BUDGET):
            layout = layout_of(plan.blocks, [share.num_tokens for share in plan.shares])
            shapes.add((layout.size, layout.window, slots_of(len(plan.shares), layout.size)))
            computed, passes = computed + layout.size, passes + 1
    padding = computed / tokens - 1
    return {"load": name, "programs": len(shapes), "padding": padding, "passes": passes / calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| case | tokens | torch, tokens/s | JAX, tokens/s | JAX / torch | first call, s |")
    print("|---|---|---|---|---|---|")
    cases: list[dict[str, Any]] = []
    for name in options.case:
        found = measured(name, options.rounds)
        cases.append(found)
        speed, first = found["tokens_per_s"], found["first_call_s"]
        print(
            f"| {name} | {found['tokens']} | {speed['torch']:.0f} | {speed['jax']:.0f} | "
            f"{found['against_torch']:.2f} | {first['torch']:.1f} and {first['jax']:.1f} |",
            flush=True,
        )
    print("\n| thousand calls | programs | padding | passes a call |\n|---|---|---|---|")
    loads = [planned(name) for name in LOADS]
    for each in loads:
        print(
            f"| {each['load']} | {each['programs']} | {each['padding']:.1%} | "
            f"{each['passes']:.1f} |"
        )
    emit("jax_passes", {"cases": cases, "loads": loads})


if __name__ == "__main__":
    main()
