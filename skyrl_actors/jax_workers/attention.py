"""Causal attention inside each row of a packed axis, as XLA computes it.

Queries lie in blocks. The keys of a block reach back as far as the longest row can, and no further,
so the work grows with the rows and not with the pass. Heads come first, because products over
leading axes are the fastest. The backward pass computes probabilities again from the logarithm of
their sums, which is kept beside the result.

Rows of several models are in one product, where a number that is not finite times the probability
zero would reach other rows. So such numbers are taken as zeros, and the results of their own row
become NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"  # the name of what a layer keeps for its backward pass
BLOCKS = 4  # of queries in a window
MASKED = -1e30
SCORES = 2**25  # at a time: 128 MiB; their exponentials exist too


def geometry(tokens: int, window: int) -> tuple[int, int]:
    """Return the queries in a block, and how many blocks back its keys reach."""
    block = min(tokens, window) // BLOCKS
    return block, min(-(-window // block), tokens // block - 1)


def allowed(numbers: Array, span: int, window: int) -> Array:
    """Return where a query may look, [n, block, keys] bool, from the row of each token [T].

    `span` is how many tokens a query sees; no row has more than `window`.
    """
    block, back = geometry(len(numbers), window)
    places = jnp.arange(len(numbers))
    own, seen = (x.reshape(-1, block)[:, :, None] for x in (numbers, places))
    keys, of_keys = (_reach(x[None], block, back)[0][:, None] for x in (numbers, places))
    far = seen - of_keys
    # Blocks before the first token are padding.
    real = jnp.arange((back + 1) * block) // block + jnp.arange(len(seen))[:, None] >= back
    return (own == keys) & (far >= 0) & (far < span) & real[:, None]


def _reach(x: Array, block: int, back: int) -> Array:
    """Return what each block can see, [H, n, (back + 1) · block, ...], of [H, T, ...]."""
    blocks = x.reshape(x.shape[0], -1, block, *x.shape[2:])
    count = blocks.shape[1]
    padded = jnp.pad(blocks, [(0, 0), (back, 0)] + [(0, 0)] * (blocks.ndim - 2))
    return jnp.concatenate([padded[:, i : i + count] for i in range(back + 1)], 2)


def _unreach(given: Array, block: int, back: int) -> Array:
    """Add up [H, n, (back + 1) · block, D] by the token that each entry comes from, [H, T, D]."""
    heads, count, _, size = given.shape
    parts = given.reshape(heads, count, back + 1, block, size)
    total = jnp.zeros((heads, count + back, block, size), given.dtype)
    for i in range(back + 1):
        total = total.at[:, i : i + count].add(parts[:, :, i])
    return total[:, back:].reshape(heads, count * block, size)


def _queries(x: Array, heads: int, block: int) -> Array:
    """Return [Hkv, n, G · block, D] of [T, Hq, D]."""
    x = x.reshape(-1, block, heads, x.shape[1] // heads, x.shape[2]).transpose(2, 0, 3, 1, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _tokens(x: Array, block: int) -> Array:
    """Return [T, Hq, D] of [Hkv, n, G · block, D]."""
    heads, count, _, size = x.shape
    x = x.reshape(heads, count, -1, block, size).transpose(1, 3, 0, 2, 4)
    return x.reshape(count * block, -1, size)


def _keys(x: Array, block: int, back: int) -> Array:
    return _reach(x.transpose(1, 0, 2), block, back)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _spoiled(q: Array, k: Array, v: Array, mask: Array, block: int, back: int) -> Array:
    """Return the tokens [T] bool that see a number that is not finite."""
    odd = ~(jnp.isfinite(k).all((1, 2)) & jnp.isfinite(v).all((1, 2)))
    seen = (mask & _reach(odd[None], block, back)[0][:, None]).any(-1).reshape(-1)
    return seen | ~jnp.isfinite(q).all((1, 2))


def _in_parts(compute: Callable[..., Any], mask: Array, *given: Array) -> Any:
    """Return compute(mask, *given), where all of `given` and of the results lead with [Hkv, n].

    Where the scores are many, it runs head by head, or block by block too.
    """
    heads, blocks, rows = given[0].shape[:3]
    of_head = blocks * rows * mask.shape[2]
    if heads * of_head <= SCORES or heads * blocks == 1:
        return compute(mask, *given)
    if of_head <= SCORES or blocks == 1:
        found = jax.lax.map(lambda own: compute(mask, *own), tuple(x[:, None] for x in given))
        return jax.tree.map(lambda x: x[:, 0], found)
    by_block = tuple(x.swapaxes(0, 1)[:, :, None] for x in given)
    found = jax.lax.map(lambda own: _in_parts(compute, own[0], *own[1]), (mask[:, None], by_block))
    return jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), found)


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """Multiply over leading axes [Hkv, n], contracting these axes."""
    return jax.lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((0, 1), (0, 1))))


def _scores(q: Array, k: Array, mask: Array, scale: float) -> Array:
    """Return [Hkv, n, G · block, keys] float32, MASKED where a query may not look."""
    scores = _product(q, k, (3, 3)).astype(jnp.float32) * scale
    return _masked(scores, mask, MASKED)


def _masked(scores: Array, mask: Array, otherwise: float) -> Array:
    apart = scores.reshape(*scores.shape[:2], -1, *mask.shape[1:])
    return jnp.where(mask[None, :, None], apart, otherwise).reshape(scores.shape)


def _run(scale: float, mask: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return the result [Hkv, n, G · block, D] and the logarithms of sums [Hkv, n, G · block]."""
    scores = _scores(q, k, mask, scale)
    highest = scores.max(-1, keepdims=True)
    powers = jnp.exp(scores - highest)
    total = powers.sum(-1, keepdims=True)
    out = _product(powers.astype(v.dtype), v, (3, 2)) / total.astype(v.dtype)
    return out, (jnp.log(total) + highest)[..., 0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(q: Array, k: Array, v: Array, mask: Array, scale: float, window: int) -> Array:
    """Return the attention [T, Hq, D] of q [T, Hq, D] to k and v [T, Hkv, D].

    `mask` is that of `allowed`, for the same window.
    """
    return _forward(q, k, v, mask, scale, window)[0]


def _forward(q: Array, k: Array, v: Array, mask: Array, scale: float, window: int) -> Any:
    block, back = geometry(len(q), window)
    keys, values = (_keys(_finite(x), block, back) for x in (k, v))
    queries = _queries(_finite(q), k.shape[1], block)
    out, sums = _in_parts(partial(_run, scale), mask, queries, keys, values)
    spoiled = _spoiled(q, k, v, mask, block, back)
    out = jnp.where(spoiled[:, None, None], jnp.nan, _tokens(out, block))
    out, sums = checkpoint_name(out, KEPT), checkpoint_name(sums, KEPT)
    return out, (q, k, v, mask, out, sums)


def _backward(scale: float, window: int, kept: Any, slope: Array) -> Any:
    q, k, v, mask, out, sums = kept
    block, back = geometry(len(q), window)
    heads = k.shape[1]
    queries, given = (_queries(_finite(x), heads, block) for x in (q, slope))
    keys, values = (_keys(_finite(x), block, back) for x in (k, v))
    inner = (slope.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    inner = _queries(_finite(inner), heads, block)
    arrays = (queries, keys, values, given, inner, sums)
    of_q, of_k, of_v = _in_parts(partial(_slopes, scale), mask, *arrays)
    of_k, of_v = (_unreach(x, block, back).transpose(1, 0, 2) for x in (of_k, of_v))
    return _tokens(of_q, block), of_k, of_v, None


def _slopes(
    scale: float, mask: Array, q: Array, k: Array, v: Array, given: Array, inner: Array, sums: Array
) -> tuple[Array, Array, Array]:
    """Return the slopes of q, k and v from those of the result."""
    p = jnp.exp(_scores(q, k, mask, scale) - sums[..., None])
    of_p = _product(given, v, (3, 3)).astype(jnp.float32)
    of_s = (p * (of_p - inner) * scale).astype(q.dtype)
    of_v = _product(p.astype(q.dtype), given, (2, 2))
    return _product(of_s, k, (3, 2)), _product(of_s, q, (2, 2)), of_v


attend.defvjp(_forward, _backward)
