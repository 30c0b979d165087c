"""Routed experts in blocks of rows that share an expert.

A row is a pair of a token and one of its experts. Rows are sorted by expert, and the rows of an
expert begin at a new block. So a block needs one product with the weights of one expert. Blocks are
computed one after the other, because a product of all would copy the weights of each block's
expert. The number of blocks depends on the shape of a pass alone: it is the most that a choice of
experts can need.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

SMALLEST, LARGEST = 8, 128  # rows of a block


class Routed(NamedTuple):
    """The rows of a pass. N rows are n blocks of b."""

    tokens: Array  # [N] int32, the token of each row; T: padding
    places: Array  # [T, K] int32, the row of each token's pairs
    experts: Array  # [n] int32, of each block


def rows_in_block(pairs: int, experts: int) -> int:
    """Return the size of a block: about half of what an expert gets on average."""
    half = max(1, pairs // experts // 2)
    return min(LARGEST, max(SMALLEST, 1 << half.bit_length() - 1))


def routed_rows(chosen: Array, experts: int) -> Routed:
    """Lay out the pairs of tokens and their experts [T, K]."""
    tokens, k = chosen.shape
    pairs = chosen.size
    block = rows_in_block(pairs, experts)
    blocks = min(experts, pairs) + pairs // block
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    needed = -(-counts // block)
    ends = jnp.cumsum(needed)
    shift = (ends - needed) * block - (jnp.cumsum(counts) - counts)
    places = jnp.zeros(pairs, jnp.int32)
    places = places.at[order].set(jnp.arange(pairs, dtype=jnp.int32) + shift[flat[order]])
    of_row = jnp.full(blocks * block, tokens, jnp.int32)
    of_row = of_row.at[places].set(jnp.arange(pairs, dtype=jnp.int32) // k)
    of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return Routed(of_row, places.reshape(tokens, k), jnp.minimum(of_block, experts - 1))


def _rows(x: Array, routed: Routed) -> Array:
    """Return [n, b, ...] of [T, ...], with zeros for padding."""
    rows = x.at[routed.tokens].get(mode="fill", fill_value=0)
    return rows.reshape(len(routed.experts), -1, *x.shape[1:])


@jax.custom_vjp
def rows_of(x: Array, routed: Routed) -> Array:
    """Return the token's x of each row, [n, b, H], of [T, H]."""
    return _rows(x, routed)


def _rows_forward(x: Array, routed: Routed) -> Any:
    return _rows(x, routed), routed


def _rows_backward(routed: Routed, slope: Array) -> Any:
    return slope.reshape(-1, slope.shape[-1])[routed.places].sum(1), None


rows_of.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def by_token(y: Array, weights: Array, routed: Routed) -> Array:
    """Return the sum [T, H] of each token's rows of y [n, b, H], with weights [T, K]."""
    return jnp.einsum("tkh,tk->th", y.reshape(-1, y.shape[-1])[routed.places], weights)


def _sum_forward(y: Array, weights: Array, routed: Routed) -> Any:
    return by_token(y, weights, routed), (y, weights, routed)


def _sum_backward(kept: Any, slope: Array) -> Any:
    y, weights, routed = kept
    of_row = jnp.zeros(len(routed.tokens), weights.dtype)
    of_row = of_row.at[routed.places].set(weights).reshape(len(routed.experts), -1, 1)
    of_weights = jnp.einsum("tkh,th->tk", y.reshape(-1, y.shape[-1])[routed.places], slope)
    return _rows(slope, routed) * of_row, of_weights, None


by_token.defvjp(_sum_forward, _sum_backward)


@jax.custom_vjp
def of_experts(x: Array, weights: Array, experts: Array) -> Array:
    """Return x Wᵀ, [n, b, out], of x [n, b, in] with the weights [E, out, in] of each block."""
    return jax.lax.map(lambda own: own[0] @ weights[own[1]].T, (x, experts))


def _experts_forward(x: Array, weights: Array, experts: Array) -> Any:
    return of_experts(x, weights, experts), (x, weights, experts)


def _experts_backward(kept: Any, slope: Array) -> Any:
    x, weights, experts = kept
    of_x = jax.lax.map(lambda own: own[0] @ weights[own[1]], (slope, experts))

    # Where no gradient of the weights is asked for, this loop has no use and is left out.
    def add(total: Array, own: Any) -> tuple[Array, None]:
        x, slope, expert = own
        product = jnp.einsum("bo,bi->oi", slope, x, preferred_element_type=jnp.float32)
        return total.at[expert].add(product), None

    of_weights, _ = jax.lax.scan(add, jnp.zeros(weights.shape, jnp.float32), (x, slope, experts))
    return of_x, of_weights.astype(weights.dtype), None


of_experts.defvjp(_experts_forward, _experts_backward)


@jax.custom_vjp
def of_models(x: Array, factors: Array, experts: Array, slots: Array) -> Array:
    """Return F x, [n, b, out], of x [n, b, in] with each row's factor of [S, E, out, in].

    The expert is the block's, and the model of a row is in `slots` [n, b]. A block is multiplied
    with the factors of all models, and each row takes its own: numbers of one model that are not
    finite do not reach another.
    """

    def one(own: Any) -> Array:
        x, expert, slots = own
        return _own(jnp.einsum("bi,soi->bso", x, factors[:, expert]), slots)

    return jax.lax.map(one, (x, experts, slots))


def _own(found: Array, slots: Array) -> Array:
    """Return [b, ...] of [b, S, ...]: the part of each row's slot."""
    return jnp.take_along_axis(found, slots[:, None, None], 1)[:, 0]


def _apart(x: Array, slots: Array, count: int) -> Array:
    """Return [S, b, ...] of [b, ...]: the rows of each slot, and zeros for the others."""
    return jnp.where(jnp.arange(count)[:, None, None] == slots[None, :, None], x[None], 0)


def _models_forward(x: Array, factors: Array, experts: Array, slots: Array) -> Any:
    return of_models(x, factors, experts, slots), (x, factors, experts, slots)


def _models_backward(kept: Any, slope: Array) -> Any:
    x, factors, experts, slots = kept

    def one(own: Any) -> Array:
        slope, expert, slots = own
        return _own(jnp.einsum("bo,soi->bsi", slope, factors[:, expert]), slots)

    def add(total: Array, own: Any) -> tuple[Array, None]:
        x, slope, expert, slots = own
        x, slope = (_apart(each, slots, len(factors)) for each in (x, slope))
        product = jnp.einsum("sbo,sbi->soi", slope, x, preferred_element_type=jnp.float32)
        return total.at[:, expert].add(product), None

    of_x = jax.lax.map(one, (slope, experts, slots))
    start = jnp.zeros(factors.shape, jnp.float32)
    of_factors, _ = jax.lax.scan(add, start, (x, slope, experts, slots))
    return of_x, of_factors.astype(factors.dtype), None, None


of_models.defvjp(_models_forward, _models_backward)
