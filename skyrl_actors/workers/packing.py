"""Ragged rows without padding: rows of a pass lie end to end, and attention sees each row alone.

Rows are sorted by length, so rows of one length form a block that is a plain view: one attention call for each
distinct length, no gather, no mask, no padded position that could change a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "skyrl_actors_packed"


@dataclass(frozen=True)
class Block:
    start: int  # first token of the block in the packed axis
    num_rows: int
    length: int


@dataclass(frozen=True)
class Pass:
    rows: tuple[int, ...]  # row ids in packed order: ascending length
    blocks: tuple[Block, ...]
    num_tokens: int


def plan_passes(rows: Sequence[int], lengths: np.ndarray, budget_tokens: int) -> list[Pass]:
    """Cut rows into passes of at most `budget_tokens`; a longer row is a pass of its own."""
    passes: list[Pass] = []
    current: list[int] = []
    size = 0
    for row in sorted(rows, key=lambda r: int(lengths[r])):
        if current and size + lengths[row] > budget_tokens:
            passes.append(_as_pass(current, lengths))
            current, size = [], 0
        current.append(row)
        size += int(lengths[row])
    return [*passes, _as_pass(current, lengths)] if current else passes


def _as_pass(rows: list[int], lengths: np.ndarray) -> Pass:
    blocks: list[Block] = []
    start = 0
    for row in rows:
        length = int(lengths[row])
        if blocks and blocks[-1].length == length:
            blocks[-1] = Block(blocks[-1].start, blocks[-1].num_rows + 1, length)
        else:
            blocks.append(Block(start, 1, length))
        start += length
    return Pass(tuple(rows), tuple(blocks), start)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, packed_blocks: Sequence[Block] = (), **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention inside each row. query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    outputs = []
    for block in packed_blocks:
        q, k, v = (_rows_of(x, block) for x in (query, key, value))  # [n, H, L, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.size(1) != k.size(1))
        outputs.append(out.transpose(1, 2).reshape(block.num_rows * block.length, q.size(1), q.size(3)))
    return torch.cat(outputs).unsqueeze(0), None


def _rows_of(x: Tensor, block: Block) -> Tensor:
    flat = x[0, :, block.start : block.start + block.num_rows * block.length]  # [H, n·L, D]
    return flat.unflatten(1, (block.num_rows, block.length)).transpose(0, 1)


def packed_hidden(module: nn.Module, tokens: Tensor, plan: Pass) -> Tensor:
    """Last hidden states [T, H] of packed tokens [T]; `module` is the transformer without its head."""
    positions = torch.cat([torch.arange(b.length).repeat(b.num_rows) for b in plan.blocks]).to(tokens.device)
    output = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=None,
        use_cache=False,
        packed_blocks=plan.blocks,
    )
    return output.last_hidden_state[0]


AttentionInterface.register(ATTENTION, packed_attention)
