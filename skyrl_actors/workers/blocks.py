"""Blocks of rows of equal length, which are adjacent in a packed pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Adjacent rows of equal length in a packed pass."""

    start: int  # first token of the block in the packed axis
    num_rows: int
    length: int
