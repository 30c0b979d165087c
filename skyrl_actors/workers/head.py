"""Log-probabilities and entropies from hidden states, chunk by chunk, so that [T, V] logits never exist at once.

Three ways of having the gradient, alike in their results:

- *pre-gradient*, for a head that is not trained: d log p(y)/dh = W[y] − p W is formed while the chunk's logits are there;
  the backward pass multiplies it by one number for each token and needs neither logits nor W.
- *kept*: with few logits in all, the probabilities are kept.
- *recomputed*: with a head that is trained (its weight, or low-rank terms on it), the logits of each chunk are made again in
  the backward pass, and the head's gradient is added up in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 32 * 2**20  # logits that exist at a time, twice: as they are, and exponentiated
KEPT_LOGITS = 8 * 2**20  # up to so many in a pass, probabilities are kept for the backward pass


@dataclass(frozen=True)
class HeadSegment:
    """Neighbouring tokens of one model; `a` [r, H], `b` [V, r] when it trains low-rank terms of the head."""

    num_tokens: int
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Chunk:
    rows: slice
    low_rank: int  # index of a in the tensors given, b is the next; -1: none
    scale: float


def score(
    hidden: Tensor, weight: Tensor, targets: Tensor, segments: Sequence[HeadSegment], counted: Tensor | None = None,
    entropy_gradient: bool = False, score_uncounted: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log p(target) and entropy at temperature 1, float32 (float64 for float64).

    hidden [T, H], weight [V, H], targets [T] or [T, K] int64 -> logprobs of the shape of targets, entropy [T] in nats.
    Where `counted` [T] bool is False no gradient is formed; with `score_uncounted` False, no log-probability either (0), unless
    gradients are off altogether.
    """
    if counted is None or bool(counted.all()) or not torch.is_grad_enabled():
        return _scored(hidden, weight, targets, segments, entropy_gradient)
    where, rest = counted.nonzero()[:, 0], (~counted).nonzero()[:, 0]
    spans = counted.split([segment.num_tokens for segment in segments])
    logprobs, entropy = _scored(
        hidden[where], weight, targets[where], _resized(segments, [int(s.sum()) for s in spans]), entropy_gradient
    )
    all_logprobs = logprobs.new_zeros(targets.shape).index_put((where,), logprobs)
    all_entropy = entropy.new_zeros(len(targets)).index_put((where,), entropy)
    if score_uncounted:
        with torch.no_grad():
            parts = _resized(segments, [int((~s).sum()) for s in spans])
            plain, plain_entropy = _scored(hidden[rest], weight, targets[rest], parts, False)
        all_logprobs = all_logprobs.index_put((rest,), plain)
        all_entropy = all_entropy.index_put((rest,), plain_entropy)
    return all_logprobs, all_entropy


def _resized(segments: Sequence[HeadSegment], sizes: Sequence[int]) -> list[HeadSegment]:
    return [HeadSegment(size, s.a, s.b, s.scale) for s, size in zip(segments, sizes, strict=True)]


def _scored(
    hidden: Tensor, weight: Tensor, targets: Tensor, segments: Sequence[HeadSegment], entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    low_rank: list[Tensor] = []
    chunks: list[Chunk] = []
    size, start = max(1, CHUNK_LOGITS // len(weight)), 0
    for segment in segments:
        index = -1
        if segment.a is not None and segment.b is not None:
            index = len(low_rank)
            low_rank += [segment.a, segment.b]
        end = start + segment.num_tokens
        chunks += [Chunk(slice(s, min(s + size, end)), index, segment.scale) for s in range(start, end, size)]
        start = end
    wide = targets if targets.ndim == 2 else targets[:, None]
    frozen = not weight.requires_grad and not low_rank and not entropy_gradient and wide.size(1) == 1
    keep = not frozen and len(hidden) * len(weight) <= KEPT_LOGITS
    logprobs, entropy = _Score.apply(hidden, weight, wide, chunks, frozen, keep, torch.is_grad_enabled(), *low_rank)
    return logprobs.view(targets.shape).clone(), entropy  # a view of one's own outputs is what FSDP warns of


class _Logits:
    """[c, V] float32 of one chunk after the other, in the same memory: new pages for each would cost as much as the products."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunks: Sequence[Chunk], low_rank: Sequence[Tensor]):
        self._weight, self._low_rank = weight, low_rank
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        longest = max((chunk.rows.stop - chunk.rows.start for chunk in chunks), default=0)
        self._product = hidden.new_empty(longest, len(weight))
        self._wide = self._product if hidden.dtype == self.dtype else self._product.to(self.dtype)
        self._second: Tensor | None = None

    def of(self, h: Tensor, chunk: Chunk) -> Tensor:
        logits = torch.mm(h, self._weight.t(), out=self._product[: len(h)])
        if chunk.low_rank >= 0:
            a, b = (x.to(h.dtype) for x in self._low_rank[chunk.low_rank : chunk.low_rank + 2])
            logits.addmm_(h @ a.t(), b.t(), alpha=chunk.scale)
        return logits if self._wide is self._product else self._wide[: len(h)].copy_(logits)

    def second(self, count: int) -> Tensor:
        """[count, V] of further memory, used again and again too."""
        if self._second is None:
            self._second = torch.empty_like(self._wide)
        return self._second[:count]


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: list[Chunk],
        frozen: bool, keep: bool, differentiable: bool, *low_rank: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        logits_of = _Logits(hidden, weight, chunks, low_rank)
        logprobs = hidden.new_empty(targets.shape, dtype=logits_of.dtype)
        entropy = hidden.new_empty(len(targets), dtype=logits_of.dtype)
        log_sums = hidden.new_empty(len(targets), dtype=logits_of.dtype)
        slopes = torch.empty_like(hidden) if frozen and differentiable else None
        kept: list[Tensor] = []
        for chunk in chunks:
            rows, h = chunk.rows, hidden[chunk.rows]
            logits = logits_of.of(h, chunk)
            highest = logits.amax(1, keepdim=True)
            powers = torch.sub(logits, highest, out=logits_of.second(len(h))).exp_()
            total = powers.sum(1, keepdim=True)
            log_sum = total.log() + highest
            logprobs[rows] = logits.gather(1, targets[rows]) - log_sum
            entropy[rows] = log_sum[:, 0] - logits.mul_(powers).sum(1) / total[:, 0]
            log_sums[rows] = log_sum[:, 0]
            if slopes is not None:
                # 1 − p is formed in full precision: of a token that is nearly certain, little else is left.
                coefficients = powers.div_(total).neg_()
                coefficients.scatter_add_(1, targets[rows], torch.ones_like(targets[rows], dtype=coefficients.dtype))
                slopes[rows] = coefficients.to(weight.dtype) @ weight
            elif keep and differentiable:
                kept.append(powers / total)
        ctx.chunks, ctx.frozen, ctx.keep = chunks, frozen, keep
        if frozen:
            ctx.save_for_backward(*([] if slopes is None else [slopes]))
        else:
            ctx.save_for_backward(hidden, weight, targets, log_sums, entropy, *low_rank, *kept)
            ctx.num_low_rank = len(low_rank)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = gradients
        if ctx.frozen:
            (slopes,) = ctx.saved_tensors
            given = None if of_logprobs is None else of_logprobs.to(slopes.dtype) * slopes
            return given, None, None, None, None, None, None
        hidden, weight, targets, log_sums, entropy, *rest = ctx.saved_tensors
        low_rank, kept = rest[: ctx.num_low_rank], rest[ctx.num_low_rank :]
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_low_rank = [torch.zeros_like(tensor) for tensor in low_rank]
        logits_of = _Logits(hidden, weight, ctx.chunks, low_rank)
        for index, chunk in enumerate(ctx.chunks):
            rows, h = chunk.rows, hidden[chunk.rows]
            log_p = None
            if kept and of_entropy is None:
                slope = kept[index].clone()
            elif of_entropy is None:
                slope = logits_of.of(h, chunk).sub_(log_sums[rows][:, None]).exp_()
            else:
                log_p = logits_of.of(h, chunk).sub_(log_sums[rows][:, None])
                slope = torch.exp(log_p, out=logits_of.second(len(h)))
            # d/dz of Σ g·log p(y) is g·(onehot(y) − p); of the entropy, −p·(log p + H).
            factor = torch.zeros_like(log_sums[rows]) if of_logprobs is None else -of_logprobs[rows].sum(1)
            if of_entropy is not None and log_p is not None:
                slope *= factor[:, None] - of_entropy[rows][:, None] * log_p.add_(entropy[rows][:, None])
            else:
                slope *= factor[:, None]
            if of_logprobs is not None:
                slope.scatter_add_(1, targets[rows], of_logprobs[rows])
            slope = slope.to(weight.dtype)
            of_hidden[rows] = slope @ weight
            if of_weight is not None:
                of_weight.addmm_(slope.t(), h)
            if chunk.low_rank >= 0:
                _low_rank_slopes(chunk, slope, h, low_rank, of_low_rank, of_hidden)
        return of_hidden, of_weight, None, None, None, None, None, *of_low_rank


def _low_rank_slopes(
    chunk: Chunk, slope: Tensor, h: Tensor, low_rank: Sequence[Tensor], given: list[Tensor], of_hidden: Tensor
) -> None:
    a, b = (x.to(h.dtype) for x in low_rank[chunk.low_rank : chunk.low_rank + 2])
    inner = slope @ b * chunk.scale  # [c, r]
    of_hidden[chunk.rows] += inner @ a
    given[chunk.low_rank] += (inner.t() @ h).to(given[chunk.low_rank].dtype)
    given[chunk.low_rank + 1] += (slope.t() @ (h @ a.t()) * chunk.scale).to(given[chunk.low_rank + 1].dtype)
