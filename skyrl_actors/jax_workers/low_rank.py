"""Low-rank terms of many models in one product, block of tokens by block.

Each model begins at a multiple of a block, so a block has one model. Its factors are gathered for
each block. This needs the least operations and memory of the ways that XLA offers (its ragged
product is dense on CPUs and GPUs), and no program depends on which models are in a pass.

If all blocks of a call have one model, one plain product is enough. A program decides this while it
runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
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
    low: Array = _product(x, a, slots.of_block)
    blocks = by_block(low, len(slots.of_block))
    return (blocks * scale[slots.of_block][:, None, None]).reshape(low.shape)


def from_low(low: Array, b: Array, slots: Slots) -> Array:
    """Return B low, [T, out], of low [T, r] with B [S, out, r]."""
    b = b.astype(low.dtype)
    if len(b) == 1:
        return low @ b[0].T
    found: Array = _product(low, b, slots.of_block)
    return found


def _by_first(x: Array, factors: Array, of_block: Array) -> Array:
    """Return F x, [T, out], of x [T, in] with the factor of the first block, of [S, out, in]."""
    return x @ factors[of_block[0]].T


def _each_by(x: Array, factors: Array, of_block: Array) -> Array:
    """Return F x, [T, out], of x [T, in] with each block's factor of [S, out, in]."""
    blocks = by_block(x, len(of_block))
    return jnp.einsum("nti,noi->nto", blocks, factors[of_block]).reshape(len(x), -1)


@jax.custom_vjp
def _product(x: Array, factors: Array, of_block: Array) -> Array:
    return jax.lax.cond(_have_one(of_block), _by_first, _each_by, x, factors, of_block)


def _forward(x: Array, factors: Array, of_block: Array) -> Any:
    return _product(x, factors, of_block), (x, factors, of_block)


def _backward(kept: Any, slope: Array) -> Any:
    x, factors, of_block = kept

    def slopes_of(way: Callable[..., Array]) -> Callable[..., Any]:
        def slopes(slope: Array, x: Array, factors: Array, of_block: Array) -> Any:
            return jax.vjp(lambda x, factors: way(x, factors, of_block), x, factors)[1](slope)

        return slopes

    ways = slopes_of(_by_first), slopes_of(_each_by)
    of_x, of_factors = jax.lax.cond(_have_one(of_block), *ways, slope, x, factors, of_block)
    return of_x, of_factors, None


_product.defvjp(_forward, _backward)


def _have_one(of_block: Array) -> Array:
    """Return whether all blocks have one model."""
    return (of_block == of_block[0]).all()
