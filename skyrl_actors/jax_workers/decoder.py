"""The decoder: packed tokens to hidden states, with the low-rank terms of many models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from skyrl_actors.jax_workers.architecture import Architecture
from skyrl_actors.jax_workers.attention import KEPT, allowed, attend
from skyrl_actors.jax_workers.expert_terms import EXPERTS, ExpertTerms
from skyrl_actors.jax_workers.experts import by_token, of_experts, routed_rows, rows_of
from skyrl_actors.jax_workers.layers import LayerScan, rms
from skyrl_actors.jax_workers.low_rank import Slots, from_low, low_of

# Projections of a layer that adapters can have, by the names of transformers.
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
KINDS = (*PROJECTIONS, *EXPERTS)  # a mixture has experts in place of the last three
ROUTER, INTO_EXPERTS, OUT_OF_EXPERTS = (
    "mlp.gate.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)
QKV, OUT, GATE_UP, DOWN = PROJECTIONS[:3], PROJECTIONS[3:4], PROJECTIONS[4:6], PROJECTIONS[6:]
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
    masks: Array | None  # [spans, ...], see `allowed`
    slots: Slots


def layer_names(arch: Architecture, biased: bool) -> list[str]:
    """Return the tensors of one layer."""
    if arch.experts:
        names = [f"{name}.weight" for name in (*QKV, *OUT)]
        names += [ROUTER, INTO_EXPERTS, OUT_OF_EXPERTS]
    else:
        names = [f"{name}.weight" for name in PROJECTIONS]
    names += [f"{name}.bias" for name in QKV] if biased else []
    norms = (*NORMS, *(POST_NORMS if arch.post_norms else ()), *(QK_NORMS if arch.qk_norm else ()))
    return names + [f"{name}.weight" for name in norms]


class Decoder:
    """The layers of one architecture for passes of a window."""

    def __init__(
        self,
        arch: Architecture,
        window: int,
        whole: bool,
        recompute: bool,
        spread: Callable[[Array], Array],
    ):
        """With `whole`, the layers' own weights are trained, and else low-rank factors.

        `spread` divides the hidden states over the devices.
        """
        self.arch = arch
        self._window, self._spans = window, tuple(dict.fromkeys(arch.window_of))
        self._per_layer = {
            "rope": jnp.asarray(arch.rope_of, jnp.int32),
            "mask": jnp.asarray([self._spans.index(s) for s in arch.window_of], jnp.int32),
        }
        attention = partial(_in_rows, arch, window)

        def one(x: Array, trained: Any, frozen: Any, rest: Rest) -> Array:
            return layer(arch, attention, whole, spread(x), trained, frozen, rest)

        self.scan = LayerScan(one, recompute)
        self._whole = whole

    def rest(self, rows: Rows, slots: Slots, dtype: Any) -> Rest:
        cos, sin = angles(self.arch, rows.positions, dtype)
        masks = jnp.stack([allowed(rows.numbers, span, self._window) for span in self._spans])
        return Rest(cos, sin, masks, slots)

    def parts(self, weights: Tensors, factors: Any, routes: Array | None) -> tuple[Any, Any]:
        """Return the trained and the frozen tensors of all layers.

        `routes` [layers, T, K]: the experts to compute, plus 1; 0: the router chooses.
        """
        own = self._per_layer if routes is None else {**self._per_layer, "routes": routes}
        if self._whole:
            return weights, ({}, own)
        return factors, (weights, own)

    def embedded(self, embedding: Array, tokens: Array) -> Array:
        x = embedding[tokens]
        if self.arch.embed_scale == 1.0:
            return x
        return x * jnp.asarray(self.arch.embed_scale, x.dtype)

    def norm(self, x: Array, weight: Array) -> Array:
        return rms(x, weight, self.arch.eps, self.arch.norm_offset)


def angles(arch: Architecture, positions: Array, dtype: Any) -> tuple[Array, Array]:
    """Return cosines and sines [ropes, T, 1, D] at positions [T]."""
    cos, sin = zip(*(_angles(rope, positions) for rope in arch.ropes), strict=True)
    return jnp.stack(cos).astype(dtype), jnp.stack(sin).astype(dtype)


def _angles(rope: Any, positions: Array) -> tuple[Array, Array]:
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(rope.frequencies, jnp.float32)
    angles = jnp.tile(angles, 2)[:, None]  # [T, 1, D]
    return jnp.cos(angles) * rope.factor, jnp.sin(angles) * rope.factor


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


# q [T, Hq, D], k and v [T, Hkv, D], what is of this layer, what all layers share -> [T, Hq, D]
Attention = Callable[[Array, Array, Array, Tensors, Rest], Array]


def _in_rows(
    arch: Architecture, window: int, q: Array, k: Array, v: Array, own: Tensors, rest: Rest
) -> Array:
    assert rest.masks is not None
    found: Any = attend(q, k, v, rest.masks[own["mask"]], arch.query_scale, window)
    return found


def layer(
    arch: Architecture,
    attention: Attention,
    whole: bool,
    x: Array,
    trained: Any,
    frozen: Any,
    rest: Rest,
) -> Array:
    """Return the result of one layer, [T, H] of [T, H]; see `LayerScan`."""
    fixed, own = frozen
    weights, factors = (trained, {}) if whole else (fixed, trained)
    tokens = len(x)
    norm = partial(_norm, arch, weights)

    def linears(names: Sequence[str], x: Array) -> list[Array]:
        """Return the results of projections of the same x, whose A are applied as one."""
        own = [name for name in names if name in factors]
        lows: dict[str, Array] = {}
        if own:
            low = low_of(x, jnp.concatenate([factors[name][0] for name in own], -2), rest.slots)
            lows = dict(zip(own, jnp.split(low, len(own), -1), strict=True))
        return [linear(name, x, lows.get(name)) for name in names]

    def linear(name: str, x: Array, low: Array | None) -> Array:
        y = x @ weights[f"{name}.weight"].T
        if f"{name}.bias" in weights:
            y = y + weights[f"{name}.bias"]
        if low is not None:
            y = y + from_low(low, factors[name][1], rest.slots)
        return checkpoint_name(y, KEPT)

    h = norm("input_layernorm", x)
    q, k, v = (y.reshape(tokens, -1, arch.head_dim) for y in linears(QKV, h))
    if arch.qk_norm:
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
    cos, sin = rest.cos[own["rope"]], rest.sin[own["rope"]]
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    found = attention(q, k, v, own, rest)
    (found,) = linears(OUT, found.reshape(tokens, -1))
    if arch.post_norms:
        x = x + norm("post_attention_layernorm", found)
        h = norm("pre_feedforward_layernorm", x)
    else:
        x = x + found
        h = norm("post_attention_layernorm", x)
    if arch.experts:
        found = _experts(arch, weights, factors, h, rest.slots, own.get("routes"))
    else:
        gate, up = linears(GATE_UP, h)
        (found,) = linears(DOWN, _activated(arch, gate) * up)
    return x + (norm("post_feedforward_layernorm", found) if arch.post_norms else found)


def _experts(
    arch: Architecture,
    weights: Tensors,
    factors: Any,
    x: Array,
    slots: Slots,
    routes: Array | None,
) -> Array:
    """Return the result of routed experts, [T, H] of [T, H]."""
    scores = jax.nn.softmax((x @ weights[ROUTER].T).astype(jnp.float32), -1)
    chosen = jax.lax.top_k(scores, arch.experts_of_token)[1]
    if routes is not None:
        chosen = jnp.where(routes > 0, routes - 1, chosen)
    share = jnp.take_along_axis(scores, chosen, -1)
    if arch.normed_scores:
        share = share / share.sum(-1, keepdims=True)
    share = share.astype(x.dtype)
    routed = routed_rows(chosen, arch.experts)
    terms = ExpertTerms(factors, slots, routed, len(x))
    y = of_experts(rows_of(x, routed), weights[INTO_EXPERTS], routed.experts)
    y = checkpoint_name(terms.added_into(y, x), KEPT)
    gate, up = jnp.split(y, 2, -1)
    h = _activated(arch, gate) * up
    y = of_experts(h, weights[OUT_OF_EXPERTS], routed.experts)
    y, low = terms.added_out(y, h)
    return terms.with_shared(by_token(checkpoint_name(y, KEPT), share, routed), low, share)


def _norm(arch: Architecture, weights: Tensors, name: str, x: Array) -> Array:
    return rms(x, weights[f"{name}.weight"], arch.eps, arch.norm_offset)


def _activated(arch: Architecture, x: Array) -> Array:
    return jax.nn.silu(x) if arch.activation == "silu" else jax.nn.gelu(x, approximate=True)
