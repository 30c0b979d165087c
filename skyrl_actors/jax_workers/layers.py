"""The layers of a decoder in one scan, forward and backward in programs of their own.

Between them only activations are kept. A vjp of the whole would hand over the frozen weights too,
and a program copies what it returns. So the forward scan tells by identity, while it is traced,
which residuals of a layer's vjp are weights, and the backward scan reads these again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from skyrl_actors.jax_workers.attention import KEPT

Layer = Callable[..., Array]  # x, trained, frozen, rest -> x


class LayerScan:
    """A layer that is applied with each of stacked weights [layers, ...].

    `layer` gets x, the trained and the frozen tensors of one layer, and what all layers share. With
    `recompute`, a layer's input is kept and nothing else.
    """

    def __init__(self, layer: Layer, recompute: bool):
        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        self._layer = layer
        self._kept_layer = jax.checkpoint(layer, policy=policy)
        self._recompute = recompute
        self._tree: Any = None  # of one layer's vjp, and which of its leaves are weights
        self._which: tuple[int | None, ...] = ()

    @property
    def is_traced(self) -> bool:
        return self._recompute or self._tree is not None

    def plain(self, x: Array, trained: Any, frozen: Any, rest: Any) -> Array:
        """Return the result of all layers, for passes without a gradient."""
        return jax.lax.scan(
            lambda x, own: (self._layer(x, *own, rest), None), x, (trained, frozen)
        )[0]

    def forward(self, x: Array, trained: Any, frozen: Any, rest: Any) -> tuple[Array, Any]:
        """Return the result of all layers, and what `backward` needs."""

        def keep_input(x: Array, own: Any) -> Any:
            return self._layer(x, *own, rest), x

        def keep_named(x: Array, given: Any) -> Any:
            own, fixed = given
            out, back = jax.vjp(lambda x, own: self._kept_layer(x, own, fixed, rest), x, own)
            leaves, self._tree = jax.tree.flatten(back)
            known = {id(w): i for i, w in enumerate(jax.tree.leaves((own, fixed, rest)))}
            self._which = tuple(known.get(id(leaf)) for leaf in leaves)
            return out, [leaf for leaf in leaves if id(leaf) not in known]

        return jax.lax.scan(keep_input if self._recompute else keep_named, x, (trained, frozen))

    def backward(self, slope: Array, kept: Any, trained: Any, frozen: Any, rest: Any) -> Any:
        """Return the gradients of x and of the trained tensors, after `forward` was traced."""

        def again(slope: Array, parts: Any) -> Any:
            own, fixed, x = parts
            _, back = jax.vjp(lambda x, own: self._layer(x, own, fixed, rest), x, own)
            return back(slope)

        def rebuilt(slope: Array, parts: Any) -> Any:
            own, fixed, given = parts
            weights, others = jax.tree.leaves((own, fixed, rest)), iter(given)
            leaves = [next(others) if i is None else weights[i] for i in self._which]
            return jax.tree.unflatten(self._tree, leaves)(slope)

        return jax.lax.scan(
            again if self._recompute else rebuilt, slope, (trained, frozen, kept), reverse=True
        )


def rms(x: Array, weight: Array, eps: float, offset: float) -> Array:
    """Return the RMS norm of the last axis (Zhang, Sennrich, 2019), as transformers rounds it."""
    exact = x.astype(jnp.float32)
    exact = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + eps)
    if offset:
        return (exact * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
    return weight * exact.astype(x.dtype)
