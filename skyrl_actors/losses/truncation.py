"""The tokens that top_k and top_p leave, for trainers and engines alike."""

import torch
from torch import Tensor

BLOCK_LOGITS = 4 * 2**20  # logits that are sorted at a time: 48 MiB with their indices
NO_LOGIT = -1e30  # exp of it is 0, and its product with 0 is 0


def floors(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return [R]: the least logit of each row that top_k, then top_p, leave.

    logits [R, V] float32 or float64, divided by the temperature; top_k [R] int64, 0 for all;
    top_p [R]. A token is left by top_p if the more likely ones have less than top_p together. At
    least one token is left. Tokens of equal logits are left together.
    """
    rows = max(1, BLOCK_LOGITS // logits.size(1))
    blocks = [slice(start, start + rows) for start in range(0, len(logits), rows)]
    found = [_floors(logits[block], top_k[block], top_p[block]) for block in blocks]
    return torch.cat(found) if found else logits.new_empty(0)


def _floors(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    counts = torch.where(top_k > 0, top_k, logits.size(1)).clamp(max=logits.size(1))
    ranked = logits.topk(int(counts.max()), dim=1).values
    places = torch.arange(ranked.size(1), device=logits.device)
    p = ranked.masked_fill(places >= counts[:, None], -torch.inf).softmax(1)
    left = (p.cumsum(1) - p < top_p[:, None]) & (places < counts[:, None])
    left[:, 0] = True
    return ranked.gather(1, left.sum(1, keepdim=True) - 1)[:, 0]


def truncate_(logits: Tensor, least: Tensor, kept: Tensor) -> Tensor:
    """Overwrite logits [R, V] below `least` [R] by `NO_LOGIT`, except at the ids `kept` [R, K]."""
    own = logits.gather(1, kept)
    return logits.masked_fill_(logits < least[:, None], NO_LOGIT).scatter_(1, kept, own)
