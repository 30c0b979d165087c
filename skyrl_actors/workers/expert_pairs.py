"""(token, expert) pairs of a pass, sorted by expert, and the exchange between tokens and pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skyrl_actors.workers.low_rank import SegmentViews


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The n (token, expert) pairs of a pass, sorted by expert and then by segment.

    Pair i is token · K + choice.
    """

    order: Tensor  # [n] int64, the pair at each place
    places: Tensor  # [n] int64, the place of each pair
    k: int
    experts: Tensor  # [n] int64, the expert of each pair
    expert_ends: Tensor  # [E] int32, where the pairs of each expert end
    group_ends: Tensor  # [E · S] int32, where those of each expert and segment end

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the row [n, …] of each pair's token, from [T, …]."""
        return _Taken.apply(x, self)  # type: ignore[return-value]

    def by_token(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the sum [T, …] of rows [n, …] over each token's pairs, with weights [T, K]."""
        dtype = torch.promote_types(x.dtype, weights.dtype)
        return _Summed.apply(x.to(dtype), weights.to(dtype), self)  # type: ignore[return-value]

    @property
    def tokens(self) -> Tensor:
        """The token of each pair, [n] int64."""
        return self.order // self.k

    def sums(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sums [T, …] of rows [n, …] in one kernel, without a gradient."""
        places = self.places.view(-1, self.k)
        return F.embedding_bag(places, x, mode="sum", per_sample_weights=weights)


class _Taken(torch.autograd.Function):
    """Take the row of each pair's token. torch's own indexing adds up the gradient row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x.index_select(0, pairs.tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.pairs.sums(gradients[0].contiguous()), None


class _Summed(torch.autograd.Function):
    """Add up the weighted rows of each token's pairs. Rows [n, …] cost more than their products.

    So none are kept or made beside those that come in, and one gradient of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.pairs = pairs
        return pairs.sums(x, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weights = ctx.saved_tensors
        rows = gradients[0].index_select(0, ctx.pairs.tokens)
        by_weight = torch.bmm(rows[:, None], x[:, :, None]).view(-1)[ctx.pairs.places]
        rows.mul_(weights.reshape(-1).index_select(0, ctx.pairs.order)[:, None])
        return rows, by_weight.view(weights.shape), None


def sorted_pairs(top_k_index: Tensor, experts: int, segments: Sequence[SegmentViews]) -> Pairs:
    """Sort the pairs of tokens and their experts, [T, K]."""
    device, count = top_k_index.device, len(segments)
    keys = top_k_index
    if count > 1:
        numbers = [torch.full((s.num_tokens, 1), i) for i, s in enumerate(segments)]
        keys = top_k_index * count + torch.cat(numbers).to(device)
    keys, order = keys.reshape(-1).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=device)
    groups = torch.arange(experts * count, device=device)
    ends = torch.searchsorted(keys, groups, right=True).int()
    return Pairs(
        order=order,
        places=places,
        k=top_k_index.size(-1),
        experts=keys if count == 1 else keys // count,
        expert_ends=ends[count - 1 :: count],
        group_ends=ends,
    )
