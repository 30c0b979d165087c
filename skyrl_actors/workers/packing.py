"""Plan passes: pack ragged rows end to end without padding.

Rows are sorted by model and length, so rows of equal length form a block that is a plain view.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl_actors.workers.blocks import Block


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
