"""Log-probabilities and entropies from hidden states, in chunks: [T, V] logits never exist at once.

The gradient is computed in one of three ways, with the same results:

- *pre-gradient*, for a frozen head: d log p(y)/dh = W[y] − p W is formed while the chunk's logits
  exist. The backward pass multiplies it by one number for each token. It needs no logits and no W.
- *kept*: with few logits in total, the probabilities are kept (on a CPU).
- *recomputed*, for a trained head (its weight, or low-rank terms on it): the backward pass computes
  the logits of each chunk again, and accumulates the head's gradient in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skyrl_actors.losses.processing import Processing
from skyrl_actors.losses.truncation import floors, truncate_
from skyrl_actors.workers.chunk_math import NOT_COMPILED, ChunkMath, Compiled, InPlace, wide

CHUNK_LOGITS = 32 * 2**20  # logits at a time; their exponentials exist too
KEPT_LOGITS = 8 * 2**20  # a pass with at most so many keeps its probabilities
# Numbers of a lower-precision product that exist before they are added: 24 MiB.
PRODUCT_NUMBERS = 4 * 2**20
# Device types with compiled math; the CPU tests cover the compiled functions too.
COMPILED_ON: tuple[str, ...] = ("cuda",)


@dataclass(frozen=True, kw_only=True)
class HeadSegment:
    """Adjacent tokens of one model; `a` [r, H] and `b` [V, r] are low-rank terms of the head."""

    num_tokens: int
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    processing: Processing | None = None


@dataclass(frozen=True)
class Chunk:
    """A range of tokens whose logits are computed at once."""

    rows: slice
    low_rank: int  # index of `a` in the given tensors, followed by `b`; -1: none
    scale: float
    processing: Processing | None

    @property
    def truncates(self) -> bool:
        return self.processing is not None and self.processing.truncates

    def of_logits(self, slope: Tensor) -> Tensor:
        """Return the slope for logits before they are divided by the temperature."""
        return slope if self.processing is None else slope.div_(self.processing.temperature)


def score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    segments: Sequence[HeadSegment],
    counted: Tensor | None = None,
    entropy_gradient: bool = False,
    score_uncounted: bool = True,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and entropy, in float32 (float64 for float64).

    They are those of the model, at temperature 1, or of the distribution that a segment's
    processing describes.

    hidden [T, H], weight [V, H], targets [T] or [T, K] int64 -> logprobs of the shape of targets,
    entropy [T] in nats. No gradient is formed where `counted` [T] bool is False. With
    `score_uncounted` False, the log-probability is 0 there, unless gradients are disabled. With
    `softcap` c, a logit x becomes c · tanh(x / c).
    """
    if counted is None or bool(counted.all()) or not torch.is_grad_enabled():
        return _scored(hidden, weight, targets, segments, entropy_gradient, softcap)
    where, rest = counted.nonzero()[:, 0], (~counted).nonzero()[:, 0]
    spans = counted.split([segment.num_tokens for segment in segments])
    logprobs, entropy = _scored(
        hidden[where],
        weight,
        targets[where],
        _resized(segments, [int(s.sum()) for s in spans]),
        entropy_gradient,
        softcap,
    )
    all_logprobs = logprobs.new_zeros(targets.shape).index_put((where,), logprobs)
    all_entropy = entropy.new_zeros(len(targets)).index_put((where,), entropy)
    if score_uncounted:
        with torch.no_grad():
            parts = _resized(segments, [int((~s).sum()) for s in spans])
            plain, plain_entropy = _scored(
                hidden[rest], weight, targets[rest], parts, False, softcap
            )
        all_logprobs = all_logprobs.index_put((rest,), plain)
        all_entropy = all_entropy.index_put((rest,), plain_entropy)
    return all_logprobs, all_entropy


def _resized(segments: Sequence[HeadSegment], sizes: Sequence[int]) -> list[HeadSegment]:
    return [replace(s, num_tokens=size) for s, size in zip(segments, sizes, strict=True)]


def _scored(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    segments: Sequence[HeadSegment],
    entropy_gradient: bool,
    softcap: float | None,
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
        chunks += [
            Chunk(slice(s, min(s + size, end)), index, segment.scale, segment.processing)
            for s in range(start, end, size)
        ]
        start = end
    if start != len(hidden):
        # The rest of the results would be memory that nothing was written to.
        raise ValueError(f"segments of {start} tokens were given for {len(hidden)} tokens")
    many = targets if targets.ndim == 2 else targets[:, None]
    frozen = (
        not weight.requires_grad and not low_rank and not entropy_gradient and many.size(1) == 1
    )
    # Kept probabilities do not give the slope of a soft cap.
    keep = not frozen and softcap is None and len(hidden) * len(weight) <= KEPT_LOGITS
    logprobs, entropy = _Score.apply(
        hidden, weight, many, chunks, frozen, keep, torch.is_grad_enabled(), softcap, *low_rank
    )
    # FSDP warns of an output that is a view of another output of the function.
    return logprobs.view(targets.shape).clone(), entropy


class _Logits:
    """Compute the logits [c, V] of one chunk at a time, in the same memory."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        chunks: Sequence[Chunk],
        low_rank: Sequence[Tensor],
        softcap: float | None,
    ):
        self._weight, self._low_rank, self._softcap = weight, low_rank, softcap
        self._cap_slope = hidden[:0]
        self._product = hidden.new_empty(_longest(chunks), len(weight))

    def of(self, h: Tensor, chunk: Chunk) -> Tensor:
        logits = torch.mm(h, self._weight.t(), out=self._product[: len(h)])
        if chunk.low_rank >= 0:
            a, b = (x.to(h.dtype) for x in self._low_rank[chunk.low_rank : chunk.low_rank + 2])
            logits.addmm_(h @ a.t(), b.t(), alpha=chunk.scale)
        if self._softcap is not None:
            capped = logits.to(wide(logits.dtype)).div_(self._softcap).tanh_()
            self._cap_slope = 1 - capped * capped
            logits = capped.mul_(self._softcap)
        if chunk.processing is not None:
            # Before they are rounded again, as an engine divides them.
            logits = logits.to(wide(logits.dtype)).div_(chunk.processing.temperature)
        return logits

    def slope(self, chunk: Chunk, slope: Tensor) -> Tensor:
        """Return the slope by the product of h and weight, from that by the last `of`."""
        slope = chunk.of_logits(slope)
        return slope if self._softcap is None else slope.mul_(self._cap_slope)


def _least(logits: Tensor, processing: Processing | None) -> Tensor:
    """Return [c]: the least logit that top_k and top_p leave."""
    assert processing is not None
    rows = len(logits)
    top_k = torch.full((rows,), processing.top_k, device=logits.device)
    top_p = torch.full((rows,), processing.top_p, dtype=logits.dtype, device=logits.device)
    return floors(logits, top_k, top_p)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunks: list[Chunk],
        frozen: bool,
        keep: bool,
        differentiable: bool,
        softcap: float | None,
        *low_rank: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logits_of = _Logits(hidden, weight, chunks, low_rank, softcap)
        math = _math_for(hidden, chunks)
        dtype = wide(hidden.dtype)
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        entropy, log_sums = (
            hidden.new_empty(len(targets), dtype=dtype),
            hidden.new_empty(len(targets), dtype=dtype),
        )
        least = torch.empty_like(log_sums) if any(c.truncates for c in chunks) else log_sums[:0]
        slopes = torch.empty_like(hidden) if frozen and differentiable else None
        kept: list[Tensor] = []
        for chunk in chunks:
            rows = chunk.rows
            logits = logits_of.of(hidden[rows], chunk)
            if chunk.truncates:
                least[rows] = _least(logits, chunk.processing)
                truncate_(logits, least[rows], targets[rows])
            found = math.summarise(logits, targets[rows])
            logprobs[rows], entropy[rows], log_sums[rows] = found
            if slopes is not None:
                slope = logits_of.slope(chunk, math.pre_gradient(targets[rows]))
                slopes[rows] = slope.to(weight.dtype) @ weight
            elif keep and differentiable and isinstance(math, InPlace):
                kept.append(math.probabilities())
        ctx.chunks, ctx.frozen, ctx.softcap = chunks, frozen, softcap
        if frozen:
            ctx.save_for_backward(*([] if slopes is None else [slopes]))
        else:
            ctx.save_for_backward(
                hidden, weight, targets, log_sums, entropy, least, *low_rank, *kept
            )
            ctx.num_low_rank = len(low_rank)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = gradients
        if ctx.frozen:
            (slopes,) = ctx.saved_tensors
            given = None if of_logprobs is None else of_logprobs.to(slopes.dtype) * slopes
            return given, None, None, None, None, None, None, None
        hidden, weight, targets, log_sums, entropy, least, *rest = ctx.saved_tensors
        low_rank, kept = rest[: ctx.num_low_rank], rest[ctx.num_low_rank :]
        of_hidden = torch.zeros_like(hidden)
        # Accumulated in the precision of the sums: in bfloat16, each chunk would round the total.
        of_weight = (
            torch.zeros_like(weight, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None
        )
        of_low_rank = [torch.zeros_like(tensor) for tensor in low_rank]
        logits_of = _Logits(hidden, weight, ctx.chunks, low_rank, ctx.softcap)
        math = _math_for(hidden, ctx.chunks)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(targets, dtype=log_sums.dtype)
        for index, chunk in enumerate(ctx.chunks):
            rows, h = chunk.rows, hidden[chunk.rows]
            if kept and of_entropy is None and isinstance(math, InPlace):
                slope = math.of_probabilities(kept[index].clone(), targets[rows], of_logprobs[rows])
            else:
                entropies = None if of_entropy is None else of_entropy[rows]
                logits = logits_of.of(h, chunk)
                if chunk.truncates:
                    truncate_(logits, least[rows], targets[rows])
                slope = math.slope(
                    logits,
                    log_sums[rows],
                    entropy[rows],
                    targets[rows],
                    of_logprobs[rows],
                    entropies,
                )
            slope = logits_of.slope(chunk, slope).to(weight.dtype)
            of_hidden[rows] = slope @ weight
            if of_weight is not None:
                _add_product(of_weight, slope, h)
            if chunk.low_rank >= 0:
                _low_rank_slopes(chunk, slope, h, low_rank, of_low_rank, of_hidden)
        given_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, given_weight, None, None, None, None, None, None, *of_low_rank


def _add_product(total: Tensor, slope: Tensor, h: Tensor) -> None:
    """Add slope [c, V]ᵀ · h [c, H] to total [V, H].

    A product in a lower precision is computed a few rows at a time.
    """
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), h)
        return
    rows = max(1, PRODUCT_NUMBERS // h.size(1))
    for own, part in zip(total.split(rows), slope.split(rows, dim=1), strict=True):
        own += part.t() @ h


def path(device: torch.device) -> str:
    """Return what the output layer computes with on this device."""
    if device.type not in COMPILED_ON:
        return "in place"
    return "not compiled, torch cannot compile it here" if NOT_COMPILED else "compiled"


def _math_for(hidden: Tensor, chunks: Sequence[Chunk]) -> ChunkMath:
    return Compiled() if hidden.device.type in COMPILED_ON else InPlace(_longest(chunks))


def _longest(chunks: Sequence[Chunk]) -> int:
    return max((chunk.rows.stop - chunk.rows.start for chunk in chunks), default=0)


def _low_rank_slopes(
    chunk: Chunk,
    slope: Tensor,
    h: Tensor,
    low_rank: Sequence[Tensor],
    given: list[Tensor],
    of_hidden: Tensor,
) -> None:
    a, b = (x.to(h.dtype) for x in low_rank[chunk.low_rank : chunk.low_rank + 2])
    inner = slope @ b * chunk.scale  # [c, r]
    of_hidden[chunk.rows] += inner @ a
    given[chunk.low_rank] += (inner.t() @ h).to(given[chunk.low_rank].dtype)
    given[chunk.low_rank + 1] += (slope.t() @ (h @ a.t()) * chunk.scale).to(
        given[chunk.low_rank + 1].dtype
    )
