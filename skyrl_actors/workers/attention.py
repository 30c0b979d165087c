"""Causal attention inside each row of a packed pass, registered in transformers.

Rows of equal length form a block that is a plain view. Each distinct length takes one call, without
gather or padded positions that could change a number. A kernel for variable lengths takes plain
attention on a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl_actors.workers import varlen
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.sequence import SequenceGroup

ATTENTION = "skyrl_actors_packed"


@dataclass(frozen=True, kw_only=True)
class Special:
    """What some models add to causal attention. Scores are those before the softmax.

    chunk: a token reads only tokens of its own chunk of so many tokens (Llama 4).
    softcap: a score x becomes softcap · tanh(x / softcap) (Gemma 2).
    sinks [Hq]: one more score of each head, which belongs to a value of zeros (gpt-oss).
    """

    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def changes_scores(self) -> bool:
        return self.softcap is not None or self.sinks is not None


PLAIN = Special()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_blocks: Sequence[Block] = (),
    sequence_group: SequenceGroup | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each row.

    query [1, Hq, T, D], key [1, Hkv, T, D] and value [1, Hkv, T, Dv] -> [1, T, Hq, Dv].
    """
    if sequence_group is not None:
        query, key, value = sequence_group.heads_of_all(query, key, value)
        if s_aux is not None:
            s_aux = s_aux.chunk(sequence_group.size)[sequence_group.index]
    special = Special(chunk=_chunk_of(module), softcap=softcap, sinks=s_aux)
    plain = special == PLAIN and value.size(-1) == query.size(-1)
    blocks = tuple(packed_blocks)
    if plain and varlen.can_attend(query):
        whole = varlen.attend(query, key, value, blocks, scaling, sliding_window)
    else:
        whole = attend_by_blocks(query, key, value, blocks, scaling, sliding_window, special)
    if sequence_group is not None:
        whole = sequence_group.tokens_of_this(whole)
    return whole.unsqueeze(0), None


def _chunk_of(module: nn.Module) -> int | None:
    """Return the length of this layer's chunks. Transformers has it only in its masks."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or index is None or kinds[index] != "chunked_attention":
        return None
    return getattr(config, "attention_chunk_size", None)


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Block, ...],
    scale: float | None,
    window: int | None,
    special: Special = PLAIN,
) -> Tensor:
    """Compute attention once for the rows of each length. Returns [T, Hq, Dv]."""
    outputs = []
    for block in blocks:
        q, k, v = (_rows_of(x, block) for x in (query, key, value))  # [n, H, L, D]
        mask = _mask(block.length, window, special.chunk, q.device)
        if special.changes_scores:
            out = _attend_to_scores(q, k, v, mask, scale, special)
        else:
            grouped = q.size(1) != k.size(1)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
        outputs.append(
            out.transpose(1, 2).reshape(block.num_rows * block.length, q.size(1), v.size(3))
        )
    return torch.cat(outputs)


def _rows_of(x: Tensor, block: Block) -> Tensor:
    flat = x[0, :, block.start : block.start + block.num_rows * block.length]  # [H, n·L, D]
    return flat.unflatten(1, (block.num_rows, block.length)).transpose(0, 1)


def _mask(
    length: int, window: int | None, chunk: int | None, device: torch.device
) -> Tensor | None:
    """Return [L, L] bool, true where a token (row) reads another, or None for all before it."""
    if (window or length) >= length and (chunk or length) >= length:
        return None
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    if chunk is not None:
        own = torch.arange(length, device=device) // chunk
        mask &= own[:, None] == own
    return mask


def _attend_to_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, special: Special
) -> Tensor:
    """Attend by plain products, [n, Hq, L, Dv]. The scores [n, Hq, L, L] exist in float32."""
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.size(-1) ** -0.5 if scale is None else scale)
    if special.softcap is not None:
        scores = torch.tanh(scores / special.softcap) * special.softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -math.inf)
    if special.sinks is not None:
        sinks = special.sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    shares = scores.softmax(-1)[..., : k.size(2)]  # without the sink, whose value is zero
    return shares.to(v.dtype) @ v


def prove_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Test the GPU kernel for these heads, before the first pass of a model."""
    varlen.prove(attend_by_blocks, device, dtype, head_dim)


AttentionInterface.register(ATTENTION, packed_attention)
