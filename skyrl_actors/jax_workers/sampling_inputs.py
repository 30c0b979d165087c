"""Inputs of sampling programs as arrays of numpy, to be filled in."""

import numpy as np

from skyrl_actors.jax_workers.decoder import Rows
from skyrl_actors.jax_workers.generation import Places, Prompts
from skyrl_actors.jax_workers.low_rank import Slots
from skyrl_actors.jax_workers.plans import block_of


def empty_places(count: int, scale: np.ndarray) -> Places:
    """Return `count` places that draw nothing, for slots with these scales."""
    ints = {name: np.zeros(count, np.int32) for name in ("token", "position", "end", "top_k")}
    floats = {name: np.ones(count, np.float32) for name in ("temperature", "top_p")}
    own, key = Slots(np.zeros(count, np.int32), scale), np.zeros((count, 2), np.uint32)  # type: ignore[arg-type]
    return Places(slots=own, key=key, **ints, **floats)  # type: ignore[arg-type]


def empty_prompts(size: int, beyond: int, scale: np.ndarray) -> Prompts:
    """Return a pass of padding; `beyond` is a place that the cache does not have."""
    tokens, targets, positions, numbers = (np.zeros(size, np.int32) for _ in range(4))
    of_block = np.zeros(size // block_of(size), np.int32)
    rows, own = Rows(positions, numbers), Slots(of_block, scale)  # type: ignore[arg-type]
    places = np.full(size, beyond, np.int32)
    return Prompts(tokens, rows, own, places, targets)  # type: ignore[arg-type]  jax takes arrays of numpy
