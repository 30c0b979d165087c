"""Add the low-rank terms of many models inside the layers of one network.

Rows of different models share a pass: each term applies to the tokens of its model. The tensors are
not parameters of the network, so an engine that shards weights never handles them.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyrl_actors.workers.adapter_terms import Part, Term


class SegmentViews(Protocol):
    """Adjacent tokens of one model, and the model's own tensors."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def views(self) -> Mapping[str, Tensor]: ...

    @property
    def scale(self) -> float: ...


class CurrentSegments(Protocol):
    """The network whose pass runs."""

    @property
    def segments(self) -> Sequence[SegmentViews]:
        """The segments of the tokens that layers compute now."""
        ...


def attach_to_linears(model: nn.Module, terms: Iterable[Term], current: CurrentSegments) -> None:
    """Make the linear layers of a model add these terms, for the segments of the running pass."""
    terms = tuple(terms)
    for weight, group in groupby(terms, lambda term: term.weight):
        own = tuple(group)
        layer = model.get_submodule(weight.rpartition(".")[0])
        if not own[0].experts:
            layer.register_forward_hook(partial(_add_to_linear, own, current))


def _add_to_linear(
    terms: tuple[Term, ...],
    current: CurrentSegments,
    layer: nn.Linear,
    args: tuple[Tensor, ...],
    output: Tensor,
) -> Tensor | None:
    segments = current.segments
    if not any(has_any(segment, terms) for segment in segments):
        return None
    x = args[0].flatten(0, -2)  # [T, in], of [1, T, in] or of the rows of a block [n, L, in]
    pieces = x.split([s.num_tokens for s in segments]) if len(segments) > 1 else (x,)
    added: list[Tensor] = []
    for segment, piece in zip(segments, pieces, strict=True):
        products = [
            (term.part, F.linear(F.linear(piece, a) * segment.scale, b))
            for term, a, b in factors_of(segment, terms, x.dtype)
        ]
        added.append(joined(products, piece.new_zeros(len(piece), 0), output.size(-1)))
    return output + (torch.cat(added) if len(added) > 1 else added[0]).view(output.shape)


def has_any(segment: SegmentViews, terms: Iterable[Term]) -> bool:
    """Return whether a segment's model has one of these terms."""
    return any(term.a in segment.views for term in terms)


def factors_of(
    segment: SegmentViews, terms: Iterable[Term], dtype: torch.dtype
) -> list[tuple[Term, Tensor, Tensor]]:
    """Return A and B, in this dtype, of the terms that a segment's model has."""
    return [
        (term, segment.views[term.a].to(dtype), segment.views[term.b].to(dtype))
        for term in terms
        if term.a in segment.views
    ]


def joined(
    products: Sequence[tuple[Part | None, Tensor]], like: Tensor, out_features: int
) -> Tensor:
    """Join products [n, size of their part] to [n, out_features], with zeros elsewhere.

    `like` has n rows, and the dtype and device of the zeros.
    """
    if not products:
        return like.new_zeros(len(like), out_features)
    groups = 1
    pieces: list[tuple[int, int, Tensor]] = []
    for part, product in products:
        if part is None:
            return product
        groups = part.groups
        pieces.append((part.start, part.stop, product.unflatten(-1, (groups, -1))))
    found: list[Tensor] = []
    filled = 0
    for start, stop, piece in sorted(pieces, key=lambda each: each[0]):
        if start > filled:
            found.append(like.new_zeros(len(like), groups, start - filled))
        found.append(piece)
        filled = stop
    if groups * filled < out_features:
        found.append(like.new_zeros(len(like), groups, out_features // groups - filled))
    return (torch.cat(found, -1) if len(found) > 1 else found[0]).flatten(-2)
