"""Rows of one length that lie end to end in a packed pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    start: int  # first token of the block in the packed axis
    num_rows: int
    length: int
