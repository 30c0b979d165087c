"""Weights and adapters under torch's names, as the stacked arrays of a program, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jax import Array
from torch import Tensor

from skyrl_actors.jax_workers.architecture import Architecture
from skyrl_actors.jax_workers.arrays import FSDP, TENSOR, Axes, Devices
from skyrl_actors.jax_workers.decoder import (
    DOWN,
    GATE_UP,
    INTO_EXPERTS,
    KINDS,
    OUT,
    OUT_OF_EXPERTS,
    QKV,
)
from skyrl_actors.jax_workers.expert_terms import EXPERTS, GATE, LAST, UP
from skyrl_actors.jax_workers.programs import Adapter, Base, Factors
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.adapter_terms import UNEMBED
from skyrl_actors.workers.network import UNEMBED_WEIGHT, VALUE_BIAS, VALUE_WEIGHT

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Read = Callable[[str], Tensor]  # a weight by its name
# Matrices [out, in] with the hidden size as their input, and as their output.
INTO = (EMBED, UNEMBED_WEIGHT, *(f"{name}.weight" for name in (*QKV, *GATE_UP)))
OUT_OF = tuple(f"{name}.weight" for name in (*OUT, *DOWN))


@dataclass(frozen=True)
class Names:
    """The names of a model's weights: those of each layer, and the others."""

    layers: Sequence[str]  # of one layer
    count: int

    def of_layers(self, name: str) -> list[str]:
        return [f"model.layers.{i}.{name}" for i in range(self.count)]


def names_of(arch: Architecture, given: Sequence[str], expected: Sequence[str]) -> Names:
    """Return the names of the weights. Raises ConfigError for weights that no layer uses."""
    names = Names(expected, arch.layers)
    known = {name for each in expected for name in names.of_layers(each)}
    known |= {EMBED, NORM, UNEMBED_WEIGHT, VALUE_WEIGHT, VALUE_BIAS}
    if odd := sorted({*given} - known):
        raise ConfigError(
            f"strategy jax does not compute {odd[0]} ({len(odd)} such weights of {arch.name}); "
            "use strategy replica, fsdp2 or deepspeed"
        )
    return names


def base_of(
    names: Names, given: Sequence[str], read: Read, dtype: torch.dtype, devices: Devices
) -> Base:
    """Return the weights of a base model or of a full fine-tune, in the dtype of products."""

    def one(name: str) -> Array:
        return devices.put(read(name).to(dtype), _axes(name))

    def stacked(name: str) -> Array:
        read_of = [partial(rounded, n) for n in names.of_layers(name)]
        return devices.stacked(read_of, _axes(name))

    def rounded(name: str) -> Tensor:
        return read(name).to(dtype)

    value = None
    if VALUE_WEIGHT in given:
        value = (devices.put(read(VALUE_WEIGHT)), devices.put(read(VALUE_BIAS)))
    return Base(
        embed=one(EMBED),
        layers={name: stacked(name) for name in names.layers},
        norm=one(NORM),
        head=one(UNEMBED_WEIGHT) if UNEMBED_WEIGHT in given else None,
        value=value,
    )


def _axes(name: str) -> Axes:
    """Return the axes of a mesh that divide a weight, without the axis of layers."""
    if name.endswith(INTO):
        return (TENSOR, FSDP)
    if name.endswith(OUT_OF):
        return (FSDP, TENSOR)
    if name.endswith(".bias"):
        return (TENSOR,)
    if name in (INTO_EXPERTS, OUT_OF_EXPERTS):
        return (None, TENSOR, FSDP) if name == INTO_EXPERTS else (None, FSDP, TENSOR)
    return ()


def gradients_of(found: Any, names: Names) -> dict[str, Tensor]:
    """Return the gradients of a full fine-tune by its names, from a Base of tensors."""
    of = {EMBED: found.embed, NORM: found.norm}
    if found.head is not None:
        of[UNEMBED_WEIGHT] = found.head
    if found.value is not None:
        of[VALUE_WEIGHT], of[VALUE_BIAS] = found.value
    for name, stacked in found.layers.items():
        of |= zip(names.of_layers(name), stacked, strict=True)
    return of


def kinds_in(views: Mapping[str, Tensor]) -> set[str]:
    """Return the kinds of layers that an adapter has factors of."""
    return {kind for kind in KINDS if f"model.layers.0.{kind}.lora_A" in views}


def rank_in(views: Mapping[str, Tensor]) -> int:
    """Return the largest rank of an adapter's factors."""
    return max(
        (view.size(-2) for name, view in views.items() if name.endswith("lora_A")), default=0
    )


def outer_in(views: Mapping[str, Tensor]) -> int:
    """Return the matrices of the factor at the hidden size, of an adapter on experts; else 0."""
    sides = ((GATE, "lora_A"), (UP, "lora_A"), (LAST, "lora_B"))
    found = (views.get(f"model.layers.0.{kind}.{side}") for kind, side in sides)
    return max((len(view) for view in found if view is not None), default=0)


@dataclass(frozen=True)
class Form:
    """The form of the adapters of a pass: their kinds and the rank that all are padded to."""

    kinds: tuple[str, ...]
    head: bool
    value: bool
    rank: int
    outer: int = 0  # see `outer_in`


def adapter_of(
    arch: Architecture, form: Form, views: Mapping[str, Tensor], devices: Devices
) -> Adapter:
    """Return an adapter in this form. It has zeros for what it lacks."""

    def padded(a: Tensor, b: Tensor) -> tuple[Array, Array]:
        more = form.rank - a.size(-2)
        a, b = F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))
        return devices.put(a.clone()), devices.put(b.clone())

    def of_layers(kind: str) -> Factors:
        names = [f"model.layers.{i}.{kind}" for i in range(arch.layers)]
        if f"{names[0]}.lora_A" in views:
            halves = (
                torch.stack([views[f"{name}.{half}"].detach() for name in names])
                for half in ("lora_A", "lora_B")
            )
            return padded(*halves)
        out, inside = _sizes(arch)[kind]
        of_a, of_b = ((arch.layers,), (arch.layers,))
        if kind in EXPERTS:
            counts = (arch.experts, form.outer) if kind == LAST else (form.outer, arch.experts)
            of_a, of_b = ((arch.layers, count) for count in counts)
        return padded(torch.zeros(*of_a, 1, inside), torch.zeros(*of_b, out, 1))

    head = value = None
    if form.head:
        zeros = torch.zeros(1, arch.hidden), torch.zeros(arch.vocab, 1)
        a, b = (views.get(f"{UNEMBED}.{half}") for half in ("lora_A", "lora_B"))
        head = padded(*((a.detach(), b.detach()) if a is not None and b is not None else zeros))
    if form.value:
        zeros = torch.zeros(1, arch.hidden), torch.zeros(1)
        pair = views.get(VALUE_WEIGHT, zeros[0]), views.get(VALUE_BIAS, zeros[1])
        value = (
            devices.put(pair[0].detach().clone()),
            devices.put(pair[1].detach().clone()),
        )
    return Adapter({kind: of_layers(kind) for kind in form.kinds}, head, value)


def adapter_gradients(found: Any, slot: int, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of one adapter by its names, from an Adapter of tensors of all slots."""
    of: dict[str, Tensor] = {}
    for kind, (a, b) in found.layers.items():
        for layer in range(len(a)):
            name = f"model.layers.{layer}.{kind}"
            if f"{name}.lora_A" in views:
                rank = views[f"{name}.lora_A"].size(-2)
                of[f"{name}.lora_A"] = a[layer, slot, ..., :rank, :]
                of[f"{name}.lora_B"] = b[layer, slot, ..., :rank]
    if found.head is not None and f"{UNEMBED}.lora_A" in views:
        rank = len(views[f"{UNEMBED}.lora_A"])
        of[f"{UNEMBED}.lora_A"] = found.head[0][slot, :rank]
        of[f"{UNEMBED}.lora_B"] = found.head[1][slot, :, :rank]
    if found.value is not None and VALUE_WEIGHT in views:
        of[VALUE_WEIGHT], of[VALUE_BIAS] = (part[slot] for part in found.value)
    return of


def _sizes(arch: Architecture) -> dict[str, tuple[int, int]]:
    """Return the output and input features of each projection."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    return {
        "self_attn.q_proj": (q, arch.hidden),
        "self_attn.k_proj": (kv, arch.hidden),
        "self_attn.v_proj": (kv, arch.hidden),
        "self_attn.o_proj": (arch.hidden, q),
        "mlp.gate_proj": (arch.mlp, arch.hidden),
        "mlp.up_proj": (arch.mlp, arch.hidden),
        "mlp.down_proj": (arch.hidden, arch.mlp),
        GATE: (arch.mlp, arch.hidden),
        UP: (arch.mlp, arch.hidden),
        LAST: (arch.hidden, arch.mlp),
    }
