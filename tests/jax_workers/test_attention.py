"""Attention over packed rows equals each row alone in float64, in one part and in many."""

import os
from typing import Any, cast

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_actors.jax_workers import attention
from skyrl_actors.jax_workers.attention import allowed, attend

LENGTHS = (5, 40, 9, 1, 60)
HEADS, KV_HEADS, SIZE = 4, 2, 8
SCALE = SIZE**-0.5


def alone(q: np.ndarray, k: np.ndarray, v: np.ndarray, span: int) -> np.ndarray:
    """Return the attention of each row, computed in float64."""
    found = []
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        own, keys, values = (x[rows].astype(np.float64) for x in (q, k, v))
        keys, values = (np.repeat(x, HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = np.einsum("qhd,khd->hqk", own, keys) * SCALE
        far = np.arange(length)[:, None] - np.arange(length)
        scores = np.where((far >= 0) & (far < span), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), values))
        start += length
    return np.concatenate(found)


@pytest.mark.parametrize("most", [pytest.param(2**25, marks=pytest.mark.slow), 4000, 500])
@pytest.mark.parametrize("span", [pytest.param(2**30, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize(
    ("tokens", "window"), [(128, 128), pytest.param(256, 64, marks=pytest.mark.slow)]
)
def test_results_and_gradients_equal_each_row_alone(
    tokens: int, window: int, span: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    """`most`: scores at a time, so that heads and blocks are computed together or apart."""
    monkeypatch.setattr(attention, "SCORES", most)
    rng = np.random.default_rng(0)
    total = sum(LENGTHS)
    numbers = np.zeros(tokens, np.int32)
    numbers[:total] = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    q, slope = (rng.normal(size=(tokens, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(tokens, KV_HEADS, SIZE)).astype(np.float32) for _ in range(2))
    slope[total:] = 0
    mask = allowed(jnp.asarray(numbers), span, window)

    def total_of(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        compute = cast("Any", attend)  # its type stub lacks what is not differentiated
        found: jax.Array = compute(q, k, v, mask, SCALE, window)
        return (found * slope).sum(), found

    gradients, found = jax.grad(total_of, (0, 1, 2), has_aux=True)(q, k, v)
    wanted = alone(q[:total], k[:total], v[:total], span)
    np.testing.assert_allclose(found[:total], wanted, atol=2e-6)
    step = 1e-4  # the gradient along a direction, from float64
    for index, gradient in enumerate(gradients):
        inputs = [x[:total].astype(np.float64) for x in (q, k, v)]
        direction = rng.normal(size=inputs[index].shape)
        ends = []
        for sign in (1, -1):
            moved = [*inputs]
            moved[index] = inputs[index] + sign * step * direction
            ends.append((alone(moved[0], moved[1], moved[2], span) * slope[:total]).sum())
        along = float((np.asarray(gradient)[:total] * direction).sum())
        assert along == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-3)
        assert not np.asarray(gradient)[total:].any()
