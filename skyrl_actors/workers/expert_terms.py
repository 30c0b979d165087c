"""Add the low-rank terms of many models inside routed experts.

Experts get (token, expert) pairs, sorted by expert. Each projection of a model's pairs is one
grouped product, so the cost grows with the tokens. A factor that all experts share is applied once
a token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

from skyrl_actors.workers.adapter_terms import Term, is_experts
from skyrl_actors.workers.low_rank import (
    CurrentSegments,
    SegmentViews,
    factors_of,
    has_any,
    joined,
)

ALIGNED = 16  # bytes; torch's grouped products need rows of a multiple of it


def attach_to_experts(model: nn.Module, terms: Iterable[Term], current: CurrentSegments) -> None:
    """Make the routed experts of a model add these terms, for the segments of the running pass."""
    terms = tuple(terms)
    for name, layer in model.named_modules():
        if is_experts(layer):
            own = tuple(term for term in terms if term.weight.startswith(f"{name}."))
            layer.forward = AdaptedExperts(layer, own, current, layer.forward)


@dataclass(frozen=True)
class _Pairs:
    """The (token, expert) pairs of one segment, sorted by expert."""

    segment: SegmentViews
    start: int  # of the segment's tokens
    rows: Tensor | slice  # of all sorted pairs
    order: "_Order"  # of the segment's own pairs
    ends: Tensor  # [E] int32, where the pairs of each expert end


@dataclass(frozen=True)
class _Order:
    """An order of the (token, expert) pairs of some tokens. Pair i is token · K + choice."""

    pairs: Tensor  # [n], the pair at each place
    places: Tensor  # [n], the place of each pair
    k: int

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the row [n, …] of each pair's token, from [T, …]."""
        return _Gathered.apply(x, self.pairs // self.k, self.places, self.k)  # type: ignore[return-value]

    def by_pair(self, x: Tensor) -> Tensor:
        """Return rows [n, …] of this order in the order of their pairs."""
        return _Gathered.apply(x, self.places, self.pairs, 1)  # type: ignore[return-value]


class _Gathered(torch.autograd.Function):
    """Take rows, each of them k times. The backward pass gathers too, and keeps indices alone.

    torch's own indexing adds up the gradient row by row, or keeps the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        own = gradients[0].index_select(0, back)
        return own if ctx.k == 1 else own.unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Scattered(torch.autograd.Function):
    """Put rows at these places of [size, …], with zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(size, x.size(1)).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None


class AdaptedExperts:
    """The forward of routed experts with low-rank terms; without terms, the experts' own."""

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
        if not any(has_any(segment, self._terms) for segment in segments):
            return self._forward(hidden_states, top_k_index, top_k_weights)
        experts, k = self._terms[0].experts, top_k_index.size(-1)
        ids, pairs = top_k_index.reshape(-1).sort(stable=True)
        order, ends = _order(pairs, k), _ends(ids, experts)
        shares = [
            _pairs(segment, start, order, ids, ends)
            for segment, start in zip(segments, _starts(segments), strict=True)
            if has_any(segment, self._terms)
        ]
        x = self._linear(self._first, order.rows_of(hidden_states), ids, ends)
        x = self._with_into(x, hidden_states, shares)
        x = self._module._apply_gate(x) if self._module.has_gate else self._module.act_fn(x)
        y = self._linear("down_proj", x, ids, ends)
        weights = top_k_weights.reshape(-1)[:, None].index_select(0, pairs)
        y = order.by_pair(self._with_out(y, x, shares) * weights)
        total = y.unflatten(0, (-1, k)).sum(1).to(hidden_states.dtype)
        return self._with_shared_out(total, x, weights, shares)

    def _linear(self, name: str, x: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        bias = getattr(self._module, f"{name}_bias")[ids] if self._module.has_bias else None
        weight = getattr(self._module, name)
        library: Any = moe
        return library._grouped_linear(
            x, weight, ends, bias=bias, is_transposed=self._module.is_transposed
        )

    def _with_into(self, x: Tensor, hidden: Tensor, shares: list[_Pairs]) -> Tensor:
        """Add the terms from the hidden state: gate and up, or up alone."""
        added: list[tuple[_Pairs, Tensor]] = []
        for share in shares:
            own = hidden[share.start : share.start + share.segment.num_tokens]
            factors = factors_of(share.segment, self._into, hidden.dtype)
            if not factors:
                continue
            a, b = _side_by_side(factors)
            low = (
                share.order.rows_of(F.linear(own, a[0]))
                if len(a) == 1
                else _grouped(share.order.rows_of(own), a, share.ends)
            )
            found = _grouped(low * share.segment.scale, b, share.ends)
            added.append((share, _ordered(factors, found, x.size(-1))))
        return x + _at_rows(added, x) if added else x

    def _with_out(self, y: Tensor, x: Tensor, shares: list[_Pairs]) -> Tensor:
        """Add the terms to the hidden state whose B each expert has for itself."""
        added: list[tuple[_Pairs, Tensor]] = []
        for share in shares:
            for _, a, b in factors_of(share.segment, self._out, x.dtype):
                if len(b) > 1:
                    low = _grouped(_taken(x, share.rows), a, share.ends) * share.segment.scale
                    added.append((share, _grouped(low, b, share.ends)))
        return y + _at_rows(added, y) if added else y

    def _with_shared_out(
        self, total: Tensor, x: Tensor, weights: Tensor, shares: list[_Pairs]
    ) -> Tensor:
        """Add the terms whose B all experts share: the weighted sum over experts comes first."""
        pieces: list[Tensor] = []
        stop = 0
        for share in shares:
            count = share.segment.num_tokens
            for _, a, b in factors_of(share.segment, self._out, x.dtype):
                if len(b) == 1:
                    low = _grouped(_taken(x, share.rows), a, share.ends)
                    low = share.order.by_pair(low * _taken(weights, share.rows))
                    low = low.unflatten(0, (count, -1)).sum(1).to(x.dtype) * share.segment.scale
                    pieces += [total.new_zeros(share.start - stop, total.size(1))]
                    pieces += [F.linear(low, b[0])]
                    stop = share.start + count
        if not pieces:
            return total
        return total + torch.cat([*pieces, total.new_zeros(len(total) - stop, total.size(1))])


def _side_by_side(factors: list[tuple[Term, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return one pair [·, Σr, in] and [·, Σout, Σr] that computes all these pairs.

    One product of gate and up together is faster than two small ones.
    """
    total = sum(a.size(-2) for _, a, _ in factors)
    blocks: list[Tensor] = []
    start = 0
    for _, a, b in factors:
        rank = a.size(-2)
        blocks.append(F.pad(b, (start, total - start - rank)))
        start += rank
    return torch.cat([a for _, a, _ in factors], -2), torch.cat(blocks, -2)


def _ordered(
    factors: list[tuple[Term, Tensor, Tensor]], found: Tensor, out_features: int
) -> Tensor:
    """Return the products [n, Σout] of these terms in the order of a layer's outputs."""
    parts = [term.part for term, _, _ in factors]
    starts = [part.start for part in parts if part is not None and part.groups == 1]
    if found.size(-1) == out_features and len(starts) == len(parts) and starts == sorted(starts):
        return found
    products = found.split([term.out_features for term, _, _ in factors], -1)
    return joined(list(zip(parts, products, strict=True)), found, out_features)


def _taken(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x if isinstance(rows, slice) else x.index_select(0, rows)


def _at_rows(added: list[tuple[_Pairs, Tensor]], like: Tensor) -> Tensor:
    """Return the terms at the rows of their pairs, in the shape of `like`, and zeros elsewhere."""
    rows = [share.rows for share, _ in added]
    terms = [term.to(like.dtype) for _, term in added]
    if isinstance(rows[0], slice):
        return terms[0]
    places = torch.cat([each for each in rows if isinstance(each, Tensor)])
    return _Scattered.apply(torch.cat(terms), places, len(like))  # type: ignore[return-value]


def _starts(segments: Sequence[SegmentViews]) -> list[int]:
    starts = [0]
    for segment in segments[:-1]:
        starts.append(starts[-1] + segment.num_tokens)
    return starts


def _order(pairs: Tensor, k: int) -> _Order:
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(len(pairs), device=pairs.device)
    return _Order(pairs, places, k)


def _pairs(segment: SegmentViews, start: int, order: _Order, ids: Tensor, ends: Tensor) -> _Pairs:
    first, stop = start * order.k, (start + segment.num_tokens) * order.k
    if stop - first == len(ids):
        return _Pairs(segment, start, slice(None), order, ends)
    others = (order.pairs < first) | (order.pairs >= stop)
    rows = others.to(torch.int8).argsort(stable=True)[: stop - first]  # its number is known
    own = _order(order.pairs[rows] - first, order.k)
    return _Pairs(segment, start, rows, own, _ends(ids[rows], len(ends)))


def _ends(ids: Tensor, experts: int) -> Tensor:
    """Return where each expert's pairs end in sorted ids, [E] int32."""
    return torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True).int()


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return x Wᵀ, [n, out], with the weights [E, out, in] of each row's expert."""
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
