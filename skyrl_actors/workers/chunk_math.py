"""Compute log-probabilities, entropies and their gradients from the logits [c, V] of one chunk.

Two implementations give the same results. `InPlace` reuses its memory: on a CPU, new pages for each
chunk would cost as much as the products. `Compiled` lets torch fuse each step into kernels that
read the logits once. On a GPU, separate passes over [c, V] would take longer than the products.

Kernels of other packages (Liger, cut-cross-entropy) give no entropies, and compute the logits of a
frozen head a second time.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class ChunkMath(Protocol):
    """The math of one chunk of logits."""

    def summarise(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(target) [c, K], entropy [c] and logsumexp [c].

        logits [c, V], targets [c, K].
        """
        ...

    def pre_gradient(self, targets: Tensor) -> Tensor:
        """onehot(y) − p [c, V] of the last logits, which are overwritten; targets [c, 1]."""
        ...

    def slope(
        self,
        logits: Tensor,
        log_sums: Tensor,
        entropy: Tensor,
        targets: Tensor,
        of_logprobs: Tensor,
        of_entropy: Tensor | None,
    ) -> Tensor:
        """d/dlogits [c, V] of Σ of_logprobs · log p(target) + Σ of_entropy · entropy.

        The logits are overwritten. The gradient of a log-probability is onehot(y) − p. The gradient
        of an entropy H is −p·(log p + H).
        """
        ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class InPlace:
    """Chunk math in reused memory, for CPUs."""

    def __init__(self, longest: int):
        """`longest` is the number of rows of the longest chunk."""
        self._longest = longest
        self._memory: list[Tensor] = []
        self._powers = self._total = torch.empty(0)

    def _like(self, logits: Tensor, index: int) -> Tensor:
        """Return a reused buffer [c, V]."""
        while len(self._memory) <= index:
            self._memory.append(
                logits.new_empty(self._longest, logits.size(1), dtype=wide(logits.dtype))
            )
        return self._memory[index][: len(logits)]

    def _widened(self, logits: Tensor) -> Tensor:
        return logits if logits.dtype == wide(logits.dtype) else self._like(logits, 1).copy_(logits)

    def summarise(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._widened(logits)
        highest = logits.amax(1, keepdim=True)
        powers = torch.sub(logits, highest, out=self._like(logits, 0)).exp_()
        total = powers.sum(1, keepdim=True)
        log_sum = total.log() + highest
        chosen = logits.gather(1, targets) - log_sum
        self._powers, self._total = powers, total
        return chosen, log_sum[:, 0] - logits.mul_(powers).sum(1) / total[:, 0], log_sum[:, 0]

    def probabilities(self) -> Tensor:
        return self._powers / self._total

    def pre_gradient(self, targets: Tensor) -> Tensor:
        # 1 − p is computed in full precision, because little else is left of a nearly certain
        # token.
        slope = self._powers.div_(self._total).neg_()
        return slope.scatter_add_(1, targets, torch.ones_like(targets, dtype=slope.dtype))

    def slope(
        self,
        logits: Tensor,
        log_sums: Tensor,
        entropy: Tensor,
        targets: Tensor,
        of_logprobs: Tensor,
        of_entropy: Tensor | None,
    ) -> Tensor:
        log_p = self._widened(logits).sub_(log_sums[:, None])
        if of_entropy is None:
            return self.of_probabilities(log_p.exp_(), targets, of_logprobs)
        p = torch.exp(log_p, out=self._like(logits, 0))
        p *= -of_logprobs.sum(1)[:, None] - of_entropy[:, None] * log_p.add_(entropy[:, None])
        return p.scatter_add_(1, targets, of_logprobs)

    def of_probabilities(self, p: Tensor, targets: Tensor, of_logprobs: Tensor) -> Tensor:
        """`slope` without entropy, from p [c, V], which is overwritten."""
        p *= -of_logprobs.sum(1)[:, None]
        return p.scatter_add_(1, targets, of_logprobs)


def _summary(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = logits.to(wide(logits.dtype))
    highest = z.amax(1, keepdim=True)
    powers = (z - highest).exp()
    total = powers.sum(1, keepdim=True)
    log_sum = total.log() + highest
    return (
        z.gather(1, targets) - log_sum,
        log_sum[:, 0] - (z * powers).sum(1) / total[:, 0],
        log_sum[:, 0],
    )


def _everywhere(logits: Tensor, log_sums: Tensor, of_logprobs: Tensor) -> Tensor:
    """−p · Σ of_logprobs, in the dtype of the product that follows."""
    p = (logits.to(log_sums.dtype) - log_sums[:, None]).exp()
    return (-of_logprobs.sum(1)[:, None] * p).to(logits.dtype)


def _everywhere_with_entropy(
    logits: Tensor, log_sums: Tensor, of_logprobs: Tensor, entropy: Tensor, of_entropy: Tensor
) -> Tensor:
    log_p = logits.to(log_sums.dtype) - log_sums[:, None]
    factor = -of_logprobs.sum(1)[:, None] - of_entropy[:, None] * (log_p + entropy[:, None])
    return (factor * log_p.exp()).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, or the function itself where torch cannot compile it.

    A machine may have no C compiler, or a release of Triton that does not fit its GPU.
    """
    from torch._dynamo.exc import TorchDynamoException  # slow to import

    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        nonlocal compiled
        try:
            return compiled(*arguments)
        except TorchDynamoException as error:
            log.warning(
                "the output layer is not compiled, which costs speed: %s",
                str(error).splitlines()[0],
            )
            compiled = function
            NOT_COMPILED.add(function.__name__)
            return function(*arguments)

    return run


NOT_COMPILED: set[str] = set()
"""Functions that torch could not compile in this process."""


class Compiled:
    """Chunk math in kernels that torch compiles, for GPUs."""

    def __init__(self) -> None:
        self._logits = self._log_sums = torch.empty(0)

    def summarise(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = _compiled(_summary)(logits, targets)
        self._logits, self._log_sums = logits, found[2]
        return found

    def pre_gradient(self, targets: Tensor) -> Tensor:
        ones = torch.ones_like(targets, dtype=self._log_sums.dtype)
        return self.slope(self._logits, self._log_sums, self._log_sums, targets, ones, None)

    def slope(
        self,
        logits: Tensor,
        log_sums: Tensor,
        entropy: Tensor,
        targets: Tensor,
        of_logprobs: Tensor,
        of_entropy: Tensor | None,
    ) -> Tensor:
        # The sums at the targets are formed before they are rounded. A repeated target gets the
        # same sum twice.
        log_p = logits.gather(1, targets).to(log_sums.dtype) - log_sums[:, None]
        factor = -of_logprobs.sum(1)[:, None]
        if of_entropy is None:
            slope = _compiled(_everywhere)(logits, log_sums, of_logprobs)
        else:
            slope = _compiled(_everywhere_with_entropy)(
                logits, log_sums, of_logprobs, entropy, of_entropy
            )
            factor = factor - of_entropy[:, None] * (log_p + entropy[:, None])
        same = targets[:, :, None] == targets[:, None, :]
        own = (same * of_logprobs[:, None, :]).sum(2) + factor * log_p.exp()
        return slope.scatter_(1, targets, own.to(slope.dtype))
