"""Sequence parallelism: the ranks of a sequence group hold adjacent stretches of packed tokens.

Most layers compute each token separately. For attention, the ranks exchange: each rank sends its
tokens for all heads and receives all tokens for its heads, and back (DeepSpeed-Ulysses, Jacobs et
al., 2023, arXiv:2309.14509). For a layer with a state, each rank receives whole rows, and sends
them back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        return self.stretch_of(self.index, num_tokens)

    def stretch_of(self, rank: int, num_tokens: int) -> slice:
        """Return the slice of the tokens of a rank, by its index in the group."""
        each = num_tokens // self.size
        return slice(rank * each, (rank + 1) * each)

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

    def whole_rows(self, x: Tensor, cuts: Sequence[int]) -> Tensor:
        """Exchange [T/S, …] of this rank's stretch -> [n, …], the tokens of its rows.

        Rank i has the rows between cut i and cut i + 1 of the T tokens.
        """
        return _AllToAll.apply(x.contiguous(), self.ranks, *self._overlaps(cuts))

    def stretches(self, x: Tensor, cuts: Sequence[int]) -> Tensor:
        """Reverse `whole_rows`: exchange [n, …] -> [T/S, …]."""
        return _AllToAll.apply(x.contiguous(), self.ranks, *reversed(self._overlaps(cuts)))

    def _overlaps(self, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return how many tokens of this stretch are in the rows of each rank, and the reverse."""
        stretches = [self.stretch_of(rank, cuts[-1]) for rank in range(self.size)]
        rows = [slice(*pair) for pair in pairwise(cuts)]
        sent = [_overlap(stretches[self.index], own) for own in rows]
        return sent, [_overlap(own, rows[self.index]) for own in stretches]

    def gathered(self, x: Tensor) -> Tensor:
        """Gather [T/S, …] of each rank -> [T, …], without a gradient."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.ranks)
        return torch.cat(parts)


class _AllToAll(torch.autograd.Function):
    """Send parts of the first axis to the ranks. The backward pass sends the gradient back.

    `sent` and `received` are the sizes of the parts, None for equal ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ranks: dist.ProcessGroup,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return _swapped(x, ranks, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = _swapped(gradients[0].contiguous(), ctx.ranks, ctx.received, ctx.sent)
        return back, None, None, None


def _swapped(
    x: Tensor, ranks: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
) -> Tensor:
    out = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x, received, sent, group=ranks)
    return out


def _overlap(one: slice, other: slice) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
