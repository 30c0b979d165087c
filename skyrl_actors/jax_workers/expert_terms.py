"""Low-rank terms of many models inside routed experts.

A factor that all experts share has one matrix, and is applied to tokens. The others are applied to
rows, see `experts.py`.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from skyrl_actors.jax_workers.experts import Routed, by_token, of_experts, of_models, rows_of
from skyrl_actors.jax_workers.low_rank import Slots, from_low, low_of

# By Tinker's names: gate, down and up.
EXPERTS = GATE, LAST, UP = tuple(f"mlp.experts.{name}" for name in ("w1", "w2", "w3"))

# A [S, E, r, in] and B [S, E, out, r]; with one matrix in place of E where all experts share it.
Factors = Mapping[str, tuple[Array, Array]]


class ExpertTerms:
    """The terms of one layer for the rows of a pass."""

    def __init__(self, factors: Factors, slots: Slots, routed: Routed, tokens: int):
        self._factors, self._slots, self._routed = factors, slots, routed
        of_token = jnp.repeat(slots.of_block, tokens // len(slots.of_block))
        of_row = of_token.at[routed.tokens].get(mode="clip")
        self._slot_of_row = of_row.reshape(len(routed.experts), -1)

    def added_into(self, y: Array, x: Array) -> Array:
        """Return the gates and ups y [n, b, 2 · I] of tokens x [T, H] with their terms."""
        if GATE not in self._factors and UP not in self._factors:
            return y
        size = y.shape[-1] // 2
        return y + jnp.concatenate([self._into(name, x, size) for name in (GATE, UP)], -1)

    def _into(self, name: str, x: Array, size: int) -> Array:
        if name not in self._factors:
            return jnp.zeros((*self._slot_of_row.shape, size), x.dtype)
        a, b = self._factors[name]
        if a.shape[1] == 1:
            low = rows_of(low_of(x, a[:, 0], self._slots), self._routed)
        else:
            low = self._scaled(self._product(rows_of(x, self._routed), a))
        return self._product(low, b)

    def added_out(self, y: Array, h: Array) -> tuple[Array, Array | None]:
        """Return the results y [n, b, H] of h [n, b, I] with their terms.

        If all experts share B, y is as it was, and A h [n, b, r] comes with it.
        """
        if LAST not in self._factors:
            return y, None
        a, b = self._factors[LAST]
        low = self._scaled(self._product(h, a))
        return (y, low) if b.shape[1] == 1 else (y + self._product(low, b), None)

    def with_shared(self, total: Array, low: Array | None, share: Array) -> Array:
        """Return the sums over experts [T, H] with B of the sums of `low`, by `share` [T, K]."""
        if low is None:
            return total
        return total + from_low(
            by_token(low, share, self._routed), self._factors[LAST][1][:, 0], self._slots
        )

    def _scaled(self, low: Array) -> Array:
        return low * self._slots.scale.astype(low.dtype)[self._slot_of_row][..., None]

    def _product(self, x: Array, factors: Array) -> Array:
        factors, experts = factors.astype(x.dtype), self._routed.experts
        if len(factors) == 1:
            return of_experts(x, factors[0], experts)
        return of_models(x, factors, experts, self._slot_of_row)
