"""Pack ragged rows end to end without padding. Attention computes each row separately.

Rows are sorted by model and length, so rows of equal length form a block that is a plain view. Each
distinct length takes one attention call, without gather, mask or padded positions that could change
a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers import varlen
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.sequence import SequenceGroup

ATTENTION = "skyrl_actors_packed"


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of one part (a model's request) in a pass. They are adjacent in the packed axis."""

    part: int
    rows: tuple[int, ...]  # in packed order: ascending length
    start: int
    num_tokens: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The plan of one pass: its rows in packed order."""

    shares: tuple[Share, ...]
    blocks: tuple[Block, ...]
    num_tokens: int
    padding: int = 0  # tokens after the last row, as an extra row without readers

    def positions(self) -> Tensor:
        """Return [T] the index of each token in its row."""
        return torch.cat(
            [torch.arange(block.length).repeat(block.num_rows) for block in self.blocks]
        )

    def padded_to(self, multiple: int) -> "Pass":
        """Return this pass, padded to a multiple of so many tokens."""
        padding = -self.num_tokens % multiple
        if not padding:
            return self
        return Pass(
            shares=self.shares,
            blocks=(*self.blocks, Block(self.num_tokens, 1, padding)),
            num_tokens=self.num_tokens,
            padding=padding,
        )


Item = tuple[int, int, int]  # part, row, length


def plan_passes(
    parts: Sequence[tuple[Sequence[int], np.ndarray]], budget_tokens: int
) -> list[Pass]:
    """Cut the rows of each part into passes of at most `budget_tokens`. Small parts share a pass.

    A longer row is a pass of its own. Each part comes with the lengths of its columns.
    """
    items = [
        (part, row, int(lengths[row])) for part, (rows, lengths) in enumerate(parts) for row in rows
    ]
    passes: list[Pass] = []
    current: list[Item] = []
    size = 0
    for item in sorted(items, key=lambda item: (item[0], item[2])):
        if current and size + item[2] > budget_tokens:
            passes.append(_as_pass(current))
            current, size = [], 0
        current.append(item)
        size += item[2]
    return [*passes, _as_pass(current)] if current else passes


def _as_pass(items: list[Item]) -> Pass:
    blocks: list[Block] = []
    shares: list[Share] = []
    start = 0
    for part, row, length in items:
        if blocks and blocks[-1].length == length:
            blocks[-1] = Block(blocks[-1].start, blocks[-1].num_rows + 1, length)
        else:
            blocks.append(Block(start, 1, length))
        if shares and shares[-1].part == part:
            last = shares[-1]
            shares[-1] = Share(
                part=part,
                rows=(*last.rows, row),
                start=last.start,
                num_tokens=last.num_tokens + length,
            )
        else:
            shares.append(Share(part=part, rows=(row,), start=start, num_tokens=length))
        start += length
    return Pass(shares=tuple(shares), blocks=tuple(blocks), num_tokens=start)


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
    **unused: object,
) -> tuple[Tensor, None]:
    """Compute causal attention inside each row.

    query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].
    """
    if odd := [name for name in ("softcap", "s_aux") if unused.get(name) is not None]:
        raise ConfigError(
            f"{type(module).__name__} computes attention with {odd[0]}, which packed attention "
            "does not support"
        )
    if sequence_group is not None:
        query, key, value = sequence_group.heads_of_all(query, key, value)
    way = attend_by_blocks
    if varlen.can_attend(query):
        way = varlen.attend
    whole = way(query, key, value, tuple(packed_blocks), scaling, sliding_window)
    if sequence_group is not None:
        whole = sequence_group.tokens_of_this(whole)
    return whole.unsqueeze(0), None


def attend_by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Block, ...],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Call torch's attention once for the rows of each length. Returns [T, Hq, D]."""
    outputs = []
    for block in blocks:
        q, k, v = (_rows_of(x, block) for x in (query, key, value))  # [n, H, L, D]
        mask = None
        if window is not None and window < block.length:
            mask = (
                torch.ones(block.length, block.length, dtype=torch.bool, device=q.device)
                .tril()
                .triu(1 - window)
            )
        grouped = q.size(1) != k.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(
            out.transpose(1, 2).reshape(block.num_rows * block.length, q.size(1), q.size(3))
        )
    return torch.cat(outputs)


def _rows_of(x: Tensor, block: Block) -> Tensor:
    flat = x[0, :, block.start : block.start + block.num_rows * block.length]  # [H, n·L, D]
    return flat.unflatten(1, (block.num_rows, block.length)).transpose(0, 1)


def prove_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Test the GPU kernel for these heads, before the first pass of a model."""
    varlen.prove(attend_by_blocks, device, dtype, head_dim)


AttentionInterface.register(ATTENTION, packed_attention)
