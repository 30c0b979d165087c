"""Blocks of rows of equal length, which are adjacent in a packed pass."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Adjacent rows of equal length in a packed pass."""

    start: int  # first token of the block in the packed axis
    num_rows: int
    length: int

    @property
    def stop(self) -> int:
        """The token after the block's last."""
        return self.start + self.num_rows * self.length


def row_cuts(blocks: Sequence[Block], shares: int) -> tuple[int, ...]:
    """Return where to cut a pass into shares of whole rows and of about as many tokens each.

    Share i has the tokens from cut i to cut i + 1. It is empty where rows are too long.
    """
    starts = [at for block in blocks for at in range(block.start, block.stop, block.length)]
    total = blocks[-1].stop
    places = [*starts, total]
    inner = (min(places, key=lambda at: abs(at * shares - total * i)) for i in range(1, shares))
    return (0, *inner, total)


def blocks_between(blocks: Sequence[Block], start: int, stop: int) -> tuple[Block, ...]:
    """Return the blocks of the rows between two cuts."""
    found: list[Block] = []
    for block in blocks:
        first, last = max(start, block.start), min(stop, block.stop)
        if first < last:
            found.append(Block(first, (last - first) // block.length, block.length))
    return tuple(found)
