"""Log-probabilities of target tokens from hidden states, chunk by chunk, so that few logits exist at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Above this many logits in a pass, chunks are recomputed in the backward pass instead of being kept.
KEPT_LOGITS = 32 * 2**20
CHUNK_LOGITS = 8 * 2**20


def token_logprobs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], vocab_size: int) -> Tensor:
    """log p(target) at temperature 1. hidden [T, H], targets [T] or [T, K] int64 -> float32 of their shape, computed in float32."""
    chunk = max(1, CHUNK_LOGITS // vocab_size)
    recompute = torch.is_grad_enabled() and len(targets) * vocab_size > KEPT_LOGITS

    def piece(h: Tensor, t: Tensor) -> Tensor:
        logits = head(h)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if t.ndim == 2:
            return wide.gather(1, t) - wide.logsumexp(1, keepdim=True)
        return -F.cross_entropy(wide, t, reduction="none")

    parts = []
    for start in range(0, len(targets), chunk):
        h, t = hidden[start : start + chunk], targets[start : start + chunk]
        part = checkpoint(piece, h, t, use_reentrant=False) if recompute else piece(h, t)
        assert isinstance(part, Tensor)
        parts.append(part)
    return torch.cat(parts)
