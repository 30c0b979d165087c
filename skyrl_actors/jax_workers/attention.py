"""Causal attention inside each row of a packed axis, as XLA computes it.

Queries lie in blocks. The keys of a block reach back as far as the longest row can, and no further,
so the work grows with the rows and not with the pass. The backward pass computes probabilities
again from the logarithm of their sums, which is kept beside the result.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"  # the name of what a layer keeps for its backward pass
BLOCKS = 4  # of queries in a window
MASKED = -1e30


def block_of(tokens: int, window: int) -> int:
    """Return the number of queries in a block. No row has more than `window` tokens."""
    return min(tokens, window) // BLOCKS


def _reach(x: Array, block: int, back: int) -> Array:
    """Return what each block can see, [n, (back + 1) · block, ...]: its own and earlier blocks."""
    blocks = x.reshape(-1, block, *x.shape[1:])
    padded = jnp.pad(blocks, [(back, 0)] + [(0, 0)] * (blocks.ndim - 1))
    seen = [padded[i : i + len(blocks)] for i in range(back + 1)]
    return jnp.concatenate(seen, 1)


def _unreach(given: Array, block: int, back: int) -> Array:
    """Add up [n, (back + 1) · block, ...] by the token that each entry comes from, [T, ...]."""
    blocks = len(given)
    parts = given.reshape(blocks, back + 1, block, *given.shape[2:])
    total = jnp.zeros((blocks + back, block, *given.shape[2:]), given.dtype)
    for i in range(back + 1):
        total = total.at[i : i + blocks].add(parts[:, i])
    return total[back:].reshape(blocks * block, *given.shape[2:])


def _scores(
    q: Array, k: Array, rows: Array, span: Array, scale: float, block: int, back: int
) -> Array:
    """Return [n, Hkv, G, block, keys] float32, MASKED where a query may not look."""
    queries = q.reshape(-1, block, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    scores = jnp.einsum("nqhgd,nkhd->nhgqk", queries, _reach(k, block, back))
    places = jnp.arange(len(rows))
    far = places.reshape(-1, block)[:, :, None] - _reach(places, block, back)[:, None, :]
    same = rows.reshape(-1, block)[:, :, None] == _reach(rows, block, back)[:, None, :]
    allowed = same & (far >= 0) & (far < span)
    # The tokens before the first one are of no row.
    allowed = (
        allowed
        & (jnp.arange((back + 1) * block) >= (back - jnp.arange(len(queries)))[:, None] * block)[
            :, None
        ]
    )
    return jnp.where(allowed[:, None, None], scores.astype(jnp.float32) * scale, MASKED)


def _geometry(tokens: int, window: int) -> tuple[int, int]:
    block = block_of(tokens, window)
    return block, min(-(-window // block), tokens // block - 1)


def _run(
    q: Array, k: Array, v: Array, rows: Array, span: Array, scale: float, window: int
) -> tuple[Array, Array]:
    block, back = _geometry(len(q), window)
    scores = _scores(q, k, rows, span, scale, block, back)
    highest = scores.max(-1, keepdims=True)
    powers = jnp.exp(scores - highest)
    total = powers.sum(-1, keepdims=True)
    out = jnp.einsum("nhgqk,nkhd->nqhgd", (powers / total).astype(v.dtype), _reach(v, block, back))
    return out.reshape(q.shape), (jnp.log(total) + highest)[..., 0]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    q: Array, k: Array, v: Array, rows: Array, span: Array, scale: float, window: int
) -> Array:
    """Return the attention [T, Hq, D] of q [T, Hq, D] to k and v [T, Hkv, D].

    `rows` [T] numbers the rows; `span` [] is how many tokens a query sees; no row has more than
    `window` tokens.
    """
    return _run(q, k, v, rows, span, scale, window)[0]


def _forward(
    q: Array, k: Array, v: Array, rows: Array, span: Array, scale: float, window: int
) -> Any:
    out, sums = (checkpoint_name(x, KEPT) for x in _run(q, k, v, rows, span, scale, window))
    return out, (q, k, v, rows, span, out, sums)


def _backward(scale: float, window: int, kept: Any, slope: Array) -> Any:
    q, k, v, rows, span, out, sums = kept
    block, back = _geometry(len(q), window)
    shape = (-1, block, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    given, asked = slope.reshape(shape), q.reshape(shape)
    inner = (slope.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)  # [T, Hq]
    inner = inner.reshape(shape[:4]).transpose(0, 2, 3, 1)  # [n, Hkv, G, block]
    p = jnp.exp(_scores(q, k, rows, span, scale, block, back) - sums[..., None])
    of_p = jnp.einsum("nqhgd,nkhd->nhgqk", given, _reach(v, block, back)).astype(jnp.float32)
    of_s = (p * (of_p - inner[..., None]) * scale).astype(q.dtype)
    of_q = jnp.einsum("nhgqk,nkhd->nqhgd", of_s, _reach(k, block, back)).reshape(q.shape)
    of_k = jnp.einsum("nhgqk,nqhgd->nkhd", of_s, asked)
    of_v = jnp.einsum("nhgqk,nqhgd->nkhd", p.astype(q.dtype), given)
    return of_q, _unreach(of_k, block, back), _unreach(of_v, block, back), None, None


attend.defvjp(_forward, _backward)
