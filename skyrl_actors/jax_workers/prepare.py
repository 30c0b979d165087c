"""Compile the programs of usual calls ahead of the calls.

The shapes follow from the config: passes of one adapter, of every size up to `microbatch_tokens`,
with every window of rows that the context of the model allows. What other calls need is compiled
when they come.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import torch
from torch import Tensor

from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.passes import JaxPass
from skyrl_actors.jax_workers.plans import sizes_up_to, windows_of
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import VALUE_WEIGHT, PassInputs, Segment

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # one line at the start of a rank

Views = Mapping[str, Tensor]


def rows_of(size: int, longest: int) -> list[int]:
    """Return lengths of rows that fill a pass of this size; the first is the longest."""
    whole, rest = divmod(size, min(size, longest))
    return [min(size, longest)] * whole + ([rest] if rest else [])


def usual_passes(network: JaxNetwork, views: Views, budget: int) -> Iterator[JaxPass]:
    """Yield a pass of each shape for one model with these tensors. Few tokens come first."""
    for size in sizes_up_to(budget):
        for window in windows_of(size, network.max_context_tokens):
            yield JaxPass(network, _inputs(rows_of(size, window), views), True)


def _inputs(rows: list[int], views: Views) -> PassInputs:
    tokens = torch.zeros(sum(rows), dtype=torch.int64)
    starts = torch.tensor([0, *rows[:-1]]).cumsum(0).tolist()
    return PassInputs(
        tokens=tokens,
        positions=torch.cat([torch.arange(length) for length in rows]),
        blocks=tuple(Block(start, 1, row) for start, row in zip(starts, rows, strict=True)),
        segments=(Segment(len(tokens), views, 1.0),),
        targets=None if VALUE_WEIGHT in views else tokens,
        counted=None,
    )


def prepare(shapes: Iterable[Callable[[], Any]], threads: int, seconds: float) -> None:
    """Call these, which compile programs or read them from their files, for at most so long.

    A shape that began is finished. One that cannot be compiled is left to the call that needs it,
    which can be cut into smaller passes.
    """
    began = time.monotonic()

    def one(each: Callable[[], Any]) -> bool:
        if time.monotonic() - began >= seconds:
            return False
        try:
            each()
        except jax.errors.JaxRuntimeError as error:
            log.warning("a program could not be prepared: %s", error)
            return False
        return True

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(one, shapes))
    left = f"; {done.count(False)} are left to their first use" if not all(done) else ""
    log.info(
        "prepared %d shapes of programs in %.1f s%s",
        done.count(True),
        time.monotonic() - began,
        left,
    )
