"""The cases that bench.train measures in separate processes.

Each prepares, and returns the work whose time and memory are measured.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.train_setup import (
    LAYERS,
    base_of,
    columns_of,
    compute,
    plain_loop,
    plain_model,
    ragged,
    rows_of,
    tenants,
    tokens_in,
    worker_of,
)
from skyrl_actors.workers.head import HeadSegment, score

TOKENS, VOCAB, HIDDEN = 4096, 151_936, 512
Work = Callable[[], dict[str, Any]]


def head(way: str) -> Work:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN) * 0.02
    targets = torch.randint(0, VOCAB, (TOKENS,))

    def work() -> dict[str, Any]:
        started = time.perf_counter()
        if way == "full":
            loss = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
        else:
            loss = -score(hidden, weight, targets, [HeadSegment(num_tokens=TOKENS)])[0].sum()
        loss.backward()
        return {"seconds": time.perf_counter() - started, "loss": loss.item()}

    return work


def combined(way: str) -> Work:
    """Return 4 sequences of 32 to 512 tokens (log-uniform) for each of 4 tenants.

    The first half of each sequence is a prompt.
    """
    data = [rows_of(i, ragged(20 + i, 4), VOCAB) for i in range(4)]
    with base_of(VOCAB, 8) as base:
        step = _peft(base, data) if way == "peft" else _worker(base, data, way)
    step()  # this warms allocators and kernels, and allocates the memory that is kept

    def work() -> dict[str, Any]:
        started = time.perf_counter()
        loss = step()
        return {
            "seconds": time.perf_counter() - started,
            "loss": loss,
            "tokens": sum(tokens_in(rows) for rows in data),
        }

    return work


def _peft(base: Path, data: list[list[np.ndarray]]) -> Callable[[], float]:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=LAYERS, lora_dropout=0.0)
    model: Any = get_peft_model(plain_model(base), lora, adapter_name="t0")
    for i in range(1, len(data)):
        model.add_adapter(f"t{i}", lora)

    def step() -> float:
        total = 0.0
        for i, rows in enumerate(data):
            model.set_adapter(f"t{i}")
            total += plain_loop(model, rows, 4, prompts=True)
        return total

    return step


def _worker(base: Path, data: list[list[np.ndarray]], way: str) -> Callable[[], float]:
    """Return a worker.

    Prompts pass the head only if their logprobs are returned too, which is the default of a
    service.
    """
    worker = worker_of(
        base, dtype="bfloat16" if way == "bfloat16" else "float32", score_uncounted=way == "scored"
    )
    parts = [
        (name, columns_of(rows, prompts=True))
        for name, rows in zip(tenants(worker, len(data)), data, strict=True)
    ]
    return lambda: compute(worker, parts)


CASES: dict[str, Callable[[], Work]] = {
    "head-full": lambda: head("full"),
    "head-chunked": lambda: head("chunked"),
    **{
        f"combined-{way}": (lambda way=way: combined(way))
        for way in ("peft", "worker", "bfloat16", "scored")
    },
}
