"""The decoder: packed tokens to hidden states, with the low-rank terms of many models."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from skyrl_actors.jax_workers.architecture import Architecture
from skyrl_actors.jax_workers.attention import KEPT, attend
from skyrl_actors.jax_workers.layers import LayerScan, rms
from skyrl_actors.jax_workers.low_rank import Slots, from_low, low_of

# Projections of a layer that adapters can have, by the names of transformers.
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
BIASED = PROJECTIONS[:3]
NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

Tensors = Mapping[str, Array]


class Rows(NamedTuple):
    """Where the tokens of a pass lie, [T] int32: their index in a row, and the row's number."""

    positions: Array
    numbers: Array


class Rest(NamedTuple):
    """What all layers of a pass share."""

    cos: Array  # [ropes, T, 1, D]
    sin: Array
    rows: Array
    slots: Slots


def layer_names(arch: Architecture, biased: bool) -> list[str]:
    """Return the tensors of one layer."""
    names = [f"{name}.weight" for name in PROJECTIONS]
    names += [f"{name}.bias" for name in BIASED] if biased else []
    norms = (*NORMS, *(POST_NORMS if arch.post_norms else ()), *(QK_NORMS if arch.qk_norm else ()))
    return names + [f"{name}.weight" for name in norms]


class Decoder:
    """The layers of one architecture for passes of a window."""

    def __init__(self, arch: Architecture, window: int, whole: bool, recompute: bool):
        """With `whole`, the layers' own weights are trained, and else low-rank factors."""
        self.arch = arch
        self._per_layer = {
            "rope": jnp.asarray(arch.rope_of, jnp.int32),
            "span": jnp.asarray(arch.window_of, jnp.int32),
        }
        self.scan = LayerScan(partial(_layer, arch, window, whole), recompute)
        self._whole = whole

    def rest(self, rows: Rows, slots: Slots, dtype: Any) -> Rest:
        cos, sin = zip(*(_angles(rope, rows.positions) for rope in self.arch.ropes), strict=True)
        return Rest(jnp.stack(cos).astype(dtype), jnp.stack(sin).astype(dtype), rows.numbers, slots)

    def parts(self, weights: Tensors, factors: Any) -> tuple[Any, Any]:
        """Return the trained and the frozen tensors of all layers."""
        if self._whole:
            return weights, ({}, self._per_layer)
        return factors, (weights, self._per_layer)

    def embedded(self, embedding: Array, tokens: Array) -> Array:
        x = embedding[tokens]
        if self.arch.embed_scale == 1.0:
            return x
        return x * jnp.asarray(self.arch.embed_scale, x.dtype)

    def norm(self, x: Array, weight: Array) -> Array:
        return rms(x, weight, self.arch.eps, self.arch.norm_offset)


def _angles(rope: Any, positions: Array) -> tuple[Array, Array]:
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(rope.frequencies, jnp.float32)
    angles = jnp.tile(angles, 2)[:, None]  # [T, 1, D]
    return jnp.cos(angles) * rope.factor, jnp.sin(angles) * rope.factor


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def _layer(
    arch: Architecture, window: int, whole: bool, x: Array, trained: Any, frozen: Any, rest: Rest
) -> Array:
    fixed, own = frozen
    weights, factors = (trained, {}) if whole else (fixed, trained)
    tokens = len(x)
    norm = partial(_norm, arch, weights)

    def linear(name: str, x: Array) -> Array:
        y = x @ weights[f"{name}.weight"].T
        if f"{name}.bias" in weights:
            y = y + weights[f"{name}.bias"]
        if name in factors:
            a, b = factors[name]
            y = y + from_low(low_of(x, a, rest.slots), b, rest.slots)
        return checkpoint_name(y, KEPT)

    h = norm("input_layernorm", x)
    q, k, v = (
        linear(f"self_attn.{name}_proj", h).reshape(tokens, -1, arch.head_dim) for name in "qkv"
    )
    if arch.qk_norm:
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
    cos, sin = rest.cos[own["rope"]], rest.sin[own["rope"]]
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    found: Array = attend(q, k, v, rest.rows, own["span"], arch.query_scale, window)  # type: ignore[assignment]
    found = linear("self_attn.o_proj", found.reshape(tokens, -1))
    if arch.post_norms:
        x = x + norm("post_attention_layernorm", found)
        h = norm("pre_feedforward_layernorm", x)
    else:
        x = x + found
        h = norm("post_attention_layernorm", x)
    inner = _activated(arch, linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h)
    found = linear("mlp.down_proj", inner)
    return x + (norm("post_feedforward_layernorm", found) if arch.post_norms else found)


def _norm(arch: Architecture, weights: Tensors, name: str, x: Array) -> Array:
    return rms(x, weights[f"{name}.weight"], arch.eps, arch.norm_offset)


def _activated(arch: Architecture, x: Array) -> Array:
    return jax.nn.silu(x) if arch.activation == "silu" else jax.nn.gelu(x, approximate=True)
