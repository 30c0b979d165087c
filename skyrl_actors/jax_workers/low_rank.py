"""Low-rank terms of many models in one product, block of tokens by block.

Each model begins at a multiple of a block, so a block has one model. Its factors are gathered for
each block. This needs the least operations and memory of the ways that XLA offers (its ragged
product is dense on CPUs and GPUs), and no program depends on which models are in a pass.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Slots(NamedTuple):
    """The models of a pass: which one each block of tokens belongs to, and their scales."""

    of_block: Array  # [T / block] int32
    scale: Array  # [S] float32


def by_block(x: Array, blocks: int) -> Array:
    """Return [blocks, T / blocks, ...] of [T, ...]."""
    return x.reshape(blocks, -1, *x.shape[1:])


def low_of(x: Array, a: Array, slots: Slots) -> Array:
    """Return scale · A x, [T, r], of x [T, in] with A [S, r, in]."""
    a, scale = a.astype(x.dtype), slots.scale.astype(x.dtype)
    if len(a) == 1:
        return (x @ a[0].T) * scale[0]
    blocks = by_block(x, len(slots.of_block))
    low = jnp.einsum("nti,nri->ntr", blocks, a[slots.of_block])
    return (low * scale[slots.of_block][:, None, None]).reshape(len(x), -1)


def from_low(low: Array, b: Array, slots: Slots) -> Array:
    """Return B low, [T, out], of low [T, r] with B [S, out, r]."""
    b = b.astype(low.dtype)
    if len(b) == 1:
        return low @ b[0].T
    blocks = by_block(low, len(slots.of_block))
    return jnp.einsum("ntr,nor->nto", blocks, b[slots.of_block]).reshape(len(low), -1)
