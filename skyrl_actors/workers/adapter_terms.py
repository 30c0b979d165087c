"""The low-rank terms of an adapter on any model: where each one is added, and its shapes.

A term is a pair A, B whose product is added to some outputs of a layer: W + (alpha / rank) · B A.
This description is made from a model's modules, also without weights. The trainer and checkpoints
read it, so they agree on what an adapter is.

The terms are those of the Tinker service:

- Attention: the projections of queries, keys, values and outputs. Of latent attention, the
  projections from and to the hidden state. Of a layer with a state, the projections into queries,
  keys, values and gate (or x and gate), and out. Gated DeltaNet and Mamba 2 have a pair for each,
  though one weight holds several.
- MLP: gate, up and down of dense layers, shared experts and routed experts.
- Head: the output layer.
- Never: routers, norms, embeddings, convolutions, the terms of a decay, and a vision tower.

Each projection of routed experts has one pair, of three dimensions, with the names in Tinker's
files: w1 (gate, or up without a gate), w2 (down), w3 (up). In the layout `shared_outer`, the factor
at the hidden size is one matrix for all experts: A of w1 and w3, B of w2.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from skyrl_actors.messages.model import ExpertLayout, LoraSpec

Switch = Literal["train_attn", "train_mlp", "train_unembed"]
Shape = tuple[int, ...]
UNEMBED = "lm_head"
TOWER = "model.visual."  # of images, which adapters leave as it is
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "output_gate"),
    *("q_a_proj", "kv_a_proj_with_mqa"),
    *("in_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z"),
)
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "w1", "w2", "w3")
SWITCHES: dict[str, Switch] = {
    **dict.fromkeys(ATTENTION, "train_attn"),
    **dict.fromkeys(MLP, "train_mlp"),
    UNEMBED: "train_unembed",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Features `start` to `stop` of each of `groups` equal groups of a layer's outputs."""

    groups: int = 1
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Term:
    """One pair of low-rank factors, `{name}.lora_A` and `{name}.lora_B`."""

    name: str
    weight: str  # the parameter that B A is added to
    switch: Switch
    in_features: int
    out_features: int
    part: Part | None = None  # of the outputs; None: all of them
    experts: int = 0  # 0: a linear layer
    outer: Literal["A", "B"] = "A"  # of experts: the factor at the hidden size

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def a(self) -> str:
        return f"{self.name}.lora_A"

    @property
    def b(self) -> str:
        return f"{self.name}.lora_B"

    def shapes(self, rank: int, layout: ExpertLayout) -> tuple[Shape, Shape]:
        """Return the shapes of A and B."""
        a, b = (rank, self.in_features), (self.out_features, rank)
        if not self.experts:
            return a, b
        outer = 1 if layout == "shared_outer" else self.experts
        first, second = (outer, self.experts) if self.outer == "A" else (self.experts, outer)
        return (first, *a), (second, *b)


def terms_of(model: nn.Module) -> dict[str, Term]:
    """Return every term that an adapter on this model can have, in the order of its modules."""
    found: list[Term] = []
    for name, module in model.named_modules():
        if name.startswith(TOWER):
            continue
        if is_experts(module):
            found += _of_experts(name, module)
        elif isinstance(module, nn.Linear):
            found += _of_linear(name, module, model.get_submodule(name.rpartition(".")[0]))
    return {term.name: term for term in found}


def chosen(terms: Mapping[str, Term], lora: LoraSpec) -> list[Term]:
    """Return the terms that the switches of a spec select."""
    return [term for term in terms.values() if getattr(lora, term.switch)]


def is_experts(module: nn.Module) -> bool:
    """Return whether the module is routed experts with transformers' interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def whole_shape(parameter: Any) -> Shape:
    """Return the shape of a parameter, also where a rank holds only a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _of_linear(name: str, layer: nn.Linear, owner: nn.Module) -> Iterator[Term]:
    prefix, _, leaf = name.rpartition(".")
    if leaf not in SWITCHES or (leaf == UNEMBED and prefix):
        return
    for part_name, part in _parts(leaf, layer, owner).items():
        size = layer.out_features if part is None else part.groups * (part.stop - part.start)
        yield Term(
            name=f"{prefix}.{part_name}" if prefix else part_name,
            weight=f"{name}.weight",
            switch=SWITCHES[leaf],
            in_features=layer.in_features,
            out_features=size,
            part=part,
        )


def _parts(leaf: str, layer: nn.Linear, owner: Any) -> dict[str, Part | None]:
    """Return the projections that one weight holds, by the names of Tinker's files."""
    if leaf == "in_proj_qkv":
        return _adjacent(q=owner.key_dim, k=owner.key_dim, v=owner.value_dim)
    if leaf == "in_proj_qkvz":  # the heads of keys lie one after another, each with all four
        value = owner.value_dim // owner.num_k_heads
        key = owner.key_dim // owner.num_k_heads
        return _adjacent(owner.num_k_heads, q=key, k=key, v=value, z=value)
    if leaf == "in_proj" and _is_mamba2(layer, owner):
        size = int(owner.intermediate_size)
        gate, x = Part(start=0, stop=size), Part(start=size, stop=2 * size)
        return {"gate_proj": gate, "x_proj": x}
    return {leaf: None}


def _is_mamba2(layer: nn.Linear, owner: Any) -> bool:
    sizes = [getattr(owner, name, None) for name in ("intermediate_size", "conv_dim", "num_heads")]
    known = [size for size in sizes if isinstance(size, int)]
    return len(known) == len(sizes) and sum(known) == layer.out_features


def _adjacent(groups: int = 1, **sizes: int) -> dict[str, Part | None]:
    parts: dict[str, Part | None] = {}
    start = 0
    for name, size in sizes.items():
        parts[f"in_proj_{name}"] = Part(groups=groups, start=start, stop=start + size)
        start += size
    return parts


def _of_experts(name: str, module: Any) -> Iterator[Term]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    experts, *sides = whole_shape(getattr(module, first))
    hidden, width = sides if module.is_transposed else reversed(sides)
    inner = width // 2 if module.has_gate else width

    def into(key: str, index: int) -> Term:
        part = (
            Part(start=index * inner, stop=(index + 1) * inner)
            if module.is_concatenated
            else Part(groups=inner, start=index, stop=index + 1)
        )
        return Term(
            name=f"{name}.{key}",
            weight=f"{name}.{first}",
            switch="train_mlp",
            in_features=hidden,
            out_features=inner,
            part=part if module.has_gate else None,
            experts=experts,
        )

    yield into("w1", 0)
    yield Term(
        name=f"{name}.w2",
        weight=f"{name}.down_proj",
        switch="train_mlp",
        in_features=inner,
        out_features=hidden,
        experts=experts,
        outer="B",
    )
    if module.has_gate:
        yield into("w3", 1)
