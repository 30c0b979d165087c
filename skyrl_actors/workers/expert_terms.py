"""Add the low-rank terms of many models inside routed experts.

Experts get (token, expert) pairs, sorted by expert, and within an expert by model. So the pairs of
an expert are adjacent, for its own weights, and so are those of each model in it, for the model's
factors. A projection of all models is one grouped product, and the cost grows with the tokens. A
factor that all experts share is applied once a token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

from skyrl_actors.workers.adapter_terms import Term, is_experts
from skyrl_actors.workers.expert_pairs import Pairs, sorted_pairs
from skyrl_actors.workers.low_rank import CurrentSegments, SegmentViews, factors_of

ALIGNED = 16  # bytes; torch's grouped products need rows of a multiple of it


def attach_to_experts(model: nn.Module, terms: Iterable[Term], current: CurrentSegments) -> None:
    """Make the routed experts of a model add these terms, for the segments of the running pass."""
    terms = tuple(terms)
    for name, layer in model.named_modules():
        if is_experts(layer):
            own = tuple(term for term in terms if term.weight.startswith(f"{name}."))
            layer.forward = AdaptedExperts(layer, own, current, layer.forward)


class AdaptedExperts:
    """The forward of routed experts with low-rank terms. Outside passes of segments, their own."""

    def __init__(
        self,
        module: Any,
        terms: tuple[Term, ...],
        current: CurrentSegments,
        forward: Callable[..., Tensor],
    ):
        self._module, self._current, self._forward = module, current, forward
        self._terms = terms
        self._into = tuple(term for term in terms if term.outer == "A")
        self._out = tuple(term for term in terms if term.outer == "B")
        self._first = terms[0].weight.rpartition(".")[2]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute [T, H] from [T, H], and from the experts and weights of each token, [T, K]."""
        segments = self._current.segments
        if not segments:
            return self._forward(hidden_states, top_k_index, top_k_weights)
        dtype = hidden_states.dtype
        into, out = (_Factors.of(segments, own, dtype) for own in (self._into, self._out))
        pairs = sorted_pairs(top_k_index, self._terms[0].experts, segments)
        x = self._linear(self._first, pairs.rows_of(hidden_states), pairs)
        if into.present:
            low = into.low_of_tokens(hidden_states, pairs)
            x += _grouped(low, into.all_b(x.size(1)), pairs.group_ends)
        x = self._module._apply_gate(x) if self._module.has_gate else self._module.act_fn(x)
        y = self._linear("down_proj", x, pairs)
        low = _grouped(x, out.all_a(), pairs.group_ends) if out.present else None
        if low is not None and not out.shared:
            y += _grouped(low, out.all_b(y.size(1)), pairs.group_ends)
        total = pairs.by_token(y, top_k_weights).to(dtype)
        if low is not None and out.shared:
            low = pairs.by_token(low, top_k_weights).to(dtype)
            total += out.from_low(low, total.size(1))
        return total

    def _linear(self, name: str, x: Tensor, pairs: "Pairs") -> Tensor:
        bias = (
            getattr(self._module, f"{name}_bias")[pairs.experts] if self._module.has_bias else None
        )
        weight = getattr(self._module, name)
        library: Any = moe
        return library._grouped_linear(
            x, weight, pairs.expert_ends, bias=bias, is_transposed=self._module.is_transposed
        )


@dataclass(frozen=True)
class _Factors:
    """The factors of some terms of an experts' layer, of the model of each segment."""

    segments: Sequence[SegmentViews]
    of_segments: list[list[tuple[Term, Tensor, Tensor]]]  # term, A, B; empty without an adapter

    @classmethod
    def of(
        cls, segments: Sequence[SegmentViews], terms: Iterable[Term], dtype: torch.dtype
    ) -> "_Factors":
        terms = tuple(terms)
        return cls(segments, [factors_of(segment, terms, dtype) for segment in segments])

    @property
    def present(self) -> bool:
        return any(self.of_segments)

    @property
    def _any(self) -> tuple[Term, Tensor, Tensor]:
        return next(each for own in self.of_segments for each in own)

    @property
    def shared(self) -> bool:
        """Whether all experts share the factor at the hidden size."""
        term, a, b = self._any
        return len(a if term.outer == "A" else b) == 1

    @property
    def _width(self) -> int:
        """The most that the ranks of a model's terms add up to, in whole rows of a product."""
        step = ALIGNED // self._any[1].element_size()
        ranks = (sum(a.size(1) for _, a, _ in own) for own in self.of_segments)
        return -(-max(ranks) // step) * step

    def low_of_tokens(self, hidden: Tensor, pairs: Pairs) -> Tensor:
        """Return A x of each pair, [n, R], from hidden states [T, H], with the models' scales."""
        if not self.shared:
            return _grouped(pairs.rows_of(hidden), self.all_a(), pairs.group_ends)
        pieces = hidden.split([segment.num_tokens for segment in self.segments])
        lows: list[Tensor] = []
        for piece, own, segment in zip(pieces, self.of_segments, self.segments, strict=True):
            low = piece.new_zeros(len(piece), 0)
            if own:
                low = F.linear(piece, torch.cat([a[0] for _, a, _ in own])) * segment.scale
            lows.append(F.pad(low, (0, self._width - low.size(1))))
        return pairs.rows_of(torch.cat(lows) if len(lows) > 1 else lows[0])

    def from_low(self, low: Tensor, out_features: int) -> Tensor:
        """Return B x of each token, [T, out], from [T, R], with the models' scales."""
        pieces = low.split([segment.num_tokens for segment in self.segments])
        found: list[Tensor] = []
        for piece, own, segment in zip(pieces, self.of_segments, self.segments, strict=True):
            b = torch.cat([b[0] for _, _, b in own], 1) if own else low.new_zeros(out_features, 0)
            found.append(F.linear(piece[:, : b.size(1)] * segment.scale, b))
        return torch.cat(found) if len(found) > 1 else found[0]

    def all_a(self) -> Tensor:
        """Return the A of every expert and segment, [E · S, R, in].

        It has the scales, unless all experts share B.
        """
        term, a, _ = self._any
        shape = (term.experts, len(self.segments), self._width, term.in_features)
        scaled = term.outer == "A" or not self.shared
        places: list[tuple[Any, ...]] = []
        pieces: list[Tensor] = []
        for number, own in enumerate(self.of_segments):
            start = 0
            for _, a, _ in own:
                places.append((slice(None), number, slice(start, start + a.size(1))))
                pieces.append(a * self.segments[number].scale if scaled else a)
                start += a.size(1)
        return _stacked(shape, places, pieces).flatten(0, 1)

    def all_b(self, out_features: int) -> Tensor:
        """Return the B of every expert and segment, [E · S, out, R].

        Its rows are in the order of the layer's outputs. The terms of gate and up have columns of
        their own: one product of both is faster than two.
        """
        term = self._any[0]
        groups = term.part.groups if term.part else 1
        each = out_features // groups
        shape = (term.experts, len(self.segments), groups, each, self._width)
        places: list[tuple[Any, ...]] = []
        pieces: list[Tensor] = []
        for number, own in enumerate(self.of_segments):
            start = 0
            for term, _, b in own:
                rows = slice(term.part.start, term.part.stop) if term.part else slice(None)
                columns = slice(start, start + b.size(2))
                places.append((slice(None), number, slice(None), rows, columns))
                pieces.append(b)
                start += b.size(2)
        return _stacked(shape, places, pieces).flatten(0, 1).flatten(1, 2)


def _stacked(shape: tuple[int, ...], places: list[tuple[Any, ...]], pieces: list[Tensor]) -> Tensor:
    """Return zeros of this shape with each piece at its place."""
    if len(pieces) == 1 and pieces[0].numel() == torch.Size(shape).numel():
        return pieces[0].view(shape)
    return _Stacked.apply(shape, places, *pieces)  # type: ignore[return-value]


class _Stacked(torch.autograd.Function):
    """Copy pieces to their places. torch's own writes copy the whole gradient for each piece."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], places: list[tuple[Any, ...]], *pieces: Tensor
    ) -> Tensor:
        ctx.places, ctx.shapes = places, [piece.shape for piece in pieces]
        found = pieces[0].new_zeros(shape)
        for place, piece in zip(places, pieces, strict=True):
            view = found[place]
            view.copy_(piece.view(view.shape))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own = zip(ctx.places, ctx.shapes, strict=True)
        return None, None, *(gradients[0][place].reshape(shape) for place, shape in own)


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return x Wᵀ, [n, out], with the weights [G, out, in] of each row's group."""
    out = weights.size(1)
    step = ALIGNED // x.element_size()
    missing_in, missing_out = (-size % step for size in (x.size(-1), out))
    if missing_in or missing_out:
        x, weights = F.pad(x, (0, missing_in)), F.pad(weights, (0, missing_in, 0, missing_out))
    library: Any = moe
    product: Tensor = library._grouped_linear(x, weights, ends)
    if product.requires_grad:
        product.register_hook(Tensor.contiguous)  # the kernel's backward takes no other strides
    return product[:, :out]
