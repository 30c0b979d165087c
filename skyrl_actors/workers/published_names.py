"""The names under which the files of a family hold its weights.

Some families compute with other tensors than their files hold: experts in one tensor, other names
of modules. A tensor of experts is the stored ones, one after another, so no number moves: only
names and shapes change. Transformers' own conversion says which.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import ExpertLayout
from skyrl_actors.workers.adapter_terms import Term, whole_shape
from skyrl_actors.workers.buffers import stored_buffers
from skyrl_actors.workers.tensor_files import Shape, Source

EXPERTS = ".experts"


@dataclass(frozen=True)
class Stored:
    """One tensor of the files: elements of a parameter from `start` on."""

    name: str
    start: int
    shape: Shape

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def cut(parts: Iterable[Stored], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield stored tensors of a whole one, as views."""
    flat = tensor.reshape(-1)
    for part in parts:
        yield part.name, flat[part.start : part.stop].view(part.shape)


class StoredForm:
    """The tensors of a family's files for each parameter and stored buffer of a model."""

    def __init__(self, module: nn.Module):
        own = dict(module.named_parameters(remove_duplicate=False))
        self.shapes = {
            name: whole_shape(tensor) for name, tensor in (own | stored_buffers(module)).items()
        }
        self._parts = {name: _parts(module, name, shape) for name, shape in self.shapes.items()}

    def parts(self, name: str, shape: Shape) -> tuple[Stored, ...]:
        """Return the stored tensors of a parameter, in the order of its elements."""
        return self._parts.get(name) or (Stored(name, 0, shape),)

    def of_weights(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[Stored, ...]]:
        """Return the stored tensors of each of these parameters."""
        return {name: self.parts(name, shape) for name, shape in shapes.items()}

    def stored_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return names and shapes of the stored tensors of these parameters, in their order."""
        return {
            part.name: part.shape
            for name, shape in shapes.items()
            for part in self.parts(name, shape)
        }

    def cut(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors of a whole parameter, as views."""
        return cut(self.parts(name, tuple(tensor.shape)), tensor)

    def of_adapter(
        self, terms: Iterable[Term], rank: int, layout: ExpertLayout
    ) -> dict[str, tuple[Stored, ...]]:
        """Return the tensors of an adapter's file for each of its tensors.

        Terms of routed experts are below the module that holds the experts in the family's files:
        stacked as in Tinker's files, or in the layout `per_expert` one by one, as in peft's.

        Raises:
            InvalidRequest: The layout is per_expert, and the family does not store single experts.
        """
        found: dict[str, tuple[Stored, ...]] = {}
        for term in terms:
            a, b = term.shapes(rank, layout)
            if not term.experts:
                found |= {term.a: _named(term.name, "A", a), term.b: _named(term.name, "B", b)}
                continue
            names = [part.name for part in self._parts[term.weight]]
            if layout == "shared_outer":
                name = f"{names[0].partition(EXPERTS)[0]}{EXPERTS}.{term.key}"
                found |= {term.a: _named(name, "A", a), term.b: _named(name, "B", b)}
                continue
            if len(names) % term.experts:
                raise InvalidRequest(
                    "lora.expert_layout=per_expert: this base model's files do not hold single "
                    "experts; use shared_outer"
                )
            # Gate and up of an expert follow each other.
            own = names[int(term.key == "w3") :: len(names) // term.experts]
            found |= {term.a: _each(own, "A", a), term.b: _each(own, "B", b)}
        return found


def _named(name: str, half: str, shape: Shape) -> tuple[Stored, ...]:
    return (Stored(f"base_model.model.{name}.lora_{half}.weight", 0, shape),)


def _each(names: Sequence[str], half: str, shape: Shape) -> tuple[Stored, ...]:
    size = math.prod(shape[1:])
    layers = [name.removesuffix(".weight") for name in names]
    return tuple(
        Stored(f"base_model.model.{layer}.lora_{half}.weight", number * size, shape[1:])
        for number, layer in enumerate(layers)
    )


def _parts(module: Any, name: str, shape: Shape) -> tuple[Stored, ...]:
    """Return the stored tensors; the parameter itself if they are in another order."""
    whole = (Stored(name, 0, shape),)
    found = revert_weight_conversion(module, {name: torch.empty(shape, device="meta")})
    if len(found) == 1:
        ((other, tensor),) = found.items()
        return (Stored(other, 0, shape),) if tensor.shape == shape else whole
    # The same conversion of the numbers of rows finds the place of each stored tensor.
    rows = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1)
    parts: list[Stored] = []
    for other, numbers in revert_weight_conversion(module, {name: rows}).items():
        own = numbers.flatten()
        if not torch.equal(own, torch.arange(own.numel()) + own[0]):
            return whole
        parts.append(Stored(other, int(own[0]) * shape[-1], tuple(found[other].shape)))
    parts.sort(key=lambda part: part.start)
    starts, ends = [part.start for part in parts], [0, *(part.stop for part in parts)]
    return tuple(parts) if [*starts, math.prod(shape)] == ends else whole


class Published:
    """Weights by the names of a model's modules, from files with other names.

    Files with the names of the modules are read as well. Tensors that the files lack are left out.
    """

    def __init__(
        self,
        files: Source,
        stored: Mapping[str, tuple[Stored, ...]],
        shapes: Mapping[str, Shape],
    ):
        self._files = files
        self._parts: dict[str, tuple[Stored, ...]] = {}
        for name, shape in shapes.items():
            parts = stored[name]
            if all(files.shapes.get(part.name) == part.shape for part in parts):
                self._parts[name] = parts
            elif files.shapes.get(name) == shape:
                self._parts[name] = (Stored(name, 0, shape),)
        self.shapes = {name: shapes[name] for name in self._parts}

    @property
    def read(self) -> set[str]:
        """The tensors of the files that are read."""
        return {part.name for parts in self._parts.values() for part in parts}

    def range(self, name: str, start: int, stop: int) -> Tensor:
        found: list[Tensor] = []
        for part in self._parts[name]:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                found.append(self._files.range(part.name, first - part.start, last - part.start))
        if not found:
            return self._files.range(self._parts[name][0].name, 0, 0)
        return torch.cat(found) if len(found) > 1 else found[0]
