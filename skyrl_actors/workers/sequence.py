"""Sequence parallelism: the ranks of a sequence group hold adjacent stretches of packed tokens.

All layers except attention compute each token separately. For attention, the ranks exchange: each
rank sends its tokens for all heads and receives all tokens for its heads, and back
(DeepSpeed-Ulysses, Jacobs et al., 2023, arXiv:2309.14509).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share the tokens of each pass."""

    ranks: dist.ProcessGroup
    size: int
    index: int  # of this rank

    def stretch(self, num_tokens: int) -> slice:
        """Return the slice of this rank's tokens, of a number that `size` divides."""
        each = num_tokens // self.size
        return slice(self.index * each, (self.index + 1) * each)

    def heads_of_all(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [1, H, T/S, D] of this rank's tokens -> [1, H/S, T, D] of this rank's heads."""
        heads = query.size(1)
        # There are too few key heads to distribute, so each query head gets its own.
        if key.size(1) % self.size:
            key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
        query, key, value = (self._exchange_heads(x) for x in (query, key, value))
        return query, key, value

    def _exchange_heads(self, x: Tensor) -> Tensor:
        # [S, H/S, T/S, D] -> [S, T/S, H/S, D]
        by_rank = x[0].unflatten(0, (self.size, -1)).transpose(1, 2)
        return _AllToAll.apply(by_rank.contiguous(), self.ranks).flatten(0, 1).transpose(0, 1)[None]

    def tokens_of_this(self, x: Tensor) -> Tensor:
        """Exchange [T, H/S, D] of this rank's heads -> [T/S, H, D] of this rank's tokens."""
        # [S, T/S, H/S, D]
        by_rank = _AllToAll.apply(x.unflatten(0, (self.size, -1)).contiguous(), self.ranks)
        return by_rank.transpose(0, 1).flatten(1, 2)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather [T/S, …] of each rank -> [T, …], without a gradient."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.ranks)
        return torch.cat(parts)


class _AllToAll(torch.autograd.Function):
    """Send block i of the first axis to rank i. The backward pass sends the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return _swapped(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _swapped(gradients[0].contiguous(), ctx.ranks), None


def _swapped(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=ranks)
    return out
