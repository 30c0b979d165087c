"""Plan passes of few sizes, so that few programs serve every call.

A program computes a fixed number of tokens. Sizes are powers of two, with a few more below 256. A
call is cut into passes that fill their sizes: a large one, then smaller ones for the rest. So
there is little padding without many sizes. Each model of a pass begins at a multiple of a block of
tokens. All of this depends on the call alone: the same call runs the same programs in any process.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.packing import Pass, Share

SMALL = (32, 64, 96, 128, 160, 192, 256)
PASS_TOKENS = 160  # what a pass costs beside its tokens, in tokens
WINDOWS = (64, 256, 512)  # each further one is four times the one before
SLOTS = (1, 8, 64, 512)
FEW_TOKENS = 512  # a pass of so many has one window
SEVERAL_PLACES = 512  # a pass of so many tokens has places for several adapters
RANKS = (8, 16, 32, 64, 128, 256)

Item = tuple[int, int, int]  # length, part, row


def sizes_up_to(budget: int) -> list[int]:
    """Return the sizes of passes of at most `budget` tokens, and at least one."""
    powers = [2**i for i in range(9, max(10, budget.bit_length()))]
    return [size for size in (*SMALL, *powers) if size <= budget] or [SMALL[0]]


def size_of(tokens: int, small: Sequence[int] = SMALL) -> int:
    """Return the smallest size with room for so many tokens: of these, or a power of two."""
    found = next((size for size in small if size >= tokens), 0)
    return found or 1 << (tokens - 1).bit_length()


def block_of(size: int) -> int:
    """Return the tokens in a block: few in a small pass, where many models have few tokens each."""
    return min(32, max(4, size // 64))


def window_of(longest: int, size: int, windows: Sequence[int] = WINDOWS) -> int:
    """Return the window for rows of at most so many tokens."""
    if size <= FEW_TOKENS:
        return size
    window = next((each for each in windows if each >= longest), windows[-1])
    while window < longest:
        window *= 4
    return min(window, size)


def windows_of(size: int, longest: int, windows: Sequence[int] = WINDOWS) -> list[int]:
    """Return the windows that rows of at most `longest` tokens need in passes of this size."""
    lengths = [min(each, size, longest) for each in (*windows, *(2**i for i in range(9, 31)))]
    return list(dict.fromkeys(window_of(length, size, windows) for length in lengths))


def slots_of(models: int, size: int, mixture: bool = False) -> int:
    """Return the number of places for adapters.

    A small pass has several places also for one adapter, so that it needs one program. In a
    mixture, where each place costs products, there are no more than the next power of two.
    """
    if mixture:
        return 1 << (models - 1).bit_length()
    least = SLOTS[1] if size <= SEVERAL_PLACES else 1
    return next((slots for slots in SLOTS if slots >= max(models, least)), models)


def rank_of(largest: int) -> int:
    """Return the rank that adapters of a pass are padded to."""
    return next((rank for rank in RANKS if rank >= largest), largest)


def aligned(tokens: int, block: int) -> int:
    """Return the tokens of whole blocks with room for so many."""
    return -(-tokens // block) * block


@dataclass
class _Room:
    """The tokens of each part that are in a pass of one size."""

    size: int
    used: dict[int, int]
    total: int = 0

    def take(self, item: Item) -> bool:
        """Add a row if it fits."""
        length, part, _ = item
        block, before = block_of(self.size), self.used.get(part, 0)
        more = aligned(before + length, block) - aligned(before, block)
        if self.total + more > self.size:
            return False
        self.used[part], self.total = before + length, self.total + more
        return True


def plan_passes(parts: Sequence[tuple[Sequence[int], np.ndarray]], budget: int) -> list[Pass]:
    """Cut the rows of each part into passes of at most `budget` tokens, longest rows first.

    A longer row is in a pass of its own size. Each part comes with the lengths of its columns.
    """
    left: list[Item] = [
        (int(lengths[row]), part, row) for part, (rows, lengths) in enumerate(parts) for row in rows
    ]
    left.sort(key=lambda item: (-item[0], item[1], item[2]))
    passes: list[Pass] = []
    while left:
        room = _Room(_next_size(left, budget), {})
        taken, rest = list[Item](), list[Item]()
        for item in left:
            (taken if room.take(item) else rest).append(item)
        left = rest
        passes.append(_as_pass(taken))
    return passes


def _next_size(items: Sequence[Item], budget: int) -> int:
    """Return the size of the next pass: of all rows, if a smaller one first would not save more."""
    longest, total = items[0][0], sum(item[0] for item in items)
    of_parts = Counter[int]()
    for length, part, _ in items:
        of_parts[part] += length
    sizes = [size for size in sizes_up_to(budget) if size >= longest] or [size_of(longest)]
    fitting = next((size for size in sizes if _fits(of_parts.values(), size)), None)
    smaller = [size for size in sizes if size < total]
    if fitting is None or not smaller:
        return fitting or sizes[-1]
    rest = size_of(total - smaller[-1])
    return smaller[-1] if smaller[-1] + rest + PASS_TOKENS < fitting else fitting


def _as_pass(items: Iterable[Item]) -> Pass:
    blocks: list[Block] = []
    shares: dict[int, tuple[list[int], int, int]] = {}  # rows, start, tokens
    start = 0
    for length, part, row in sorted(items, key=lambda item: (item[1], item[0], item[2])):
        blocks.append(Block(start, 1, length))
        rows, first, tokens = shares.get(part, ([], start, 0))
        shares[part] = ([*rows, row], first, tokens + length)
        start += length
    found = tuple(
        Share(part=part, rows=tuple(rows), start=first, num_tokens=tokens)
        for part, (rows, first, tokens) in shares.items()
    )
    return Pass(shares=found, blocks=tuple(blocks), num_tokens=start)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the tokens of a pass lie in its program."""

    size: int
    window: int
    block: int
    places: np.ndarray  # [T] int32, of each token
    positions: np.ndarray  # [size] int32, the index of each token in its row
    numbers: np.ndarray  # [size] int32, of its row; 0 for padding
    of_block: np.ndarray  # [size / block] int32, the segment of each block


def layout_of(
    blocks: Sequence[Block],
    segments: Sequence[int],
    small: Sequence[int] = SMALL,
    windows: Sequence[int] = WINDOWS,
) -> Layout:
    """Lay out adjacent segments of so many tokens, whose rows are in `blocks`.

    Small passes have the sizes `small`, and other ones powers of two.
    """
    total = sum(segments)
    size = _size_for(segments, small)
    block = block_of(size)
    places = np.empty(total, np.int32)
    of_block = np.zeros(size // block, np.int32)
    start, place = 0, 0
    for number, tokens in enumerate(segments):
        places[start : start + tokens] = np.arange(place, place + tokens)
        of_block[place // block : aligned(place + tokens, block) // block] = number
        start, place = start + tokens, aligned(place + tokens, block)
    of_block[place // block :] = len(segments) - 1
    lengths = [block.length for block in blocks for _ in range(block.num_rows)]
    if sum(lengths) != total or any(length < 1 for length in lengths):
        raise InvalidRequest("the rows of a pass do not add up to its tokens")
    positions, numbers = np.zeros(size, np.int32), np.zeros(size, np.int32)
    counts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    positions[places] = np.arange(total) - counts
    numbers[places] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    # Padding is a row for each token, as a row of many would be a long one.
    longest = max(lengths)
    return Layout(
        size=size,
        window=window_of(longest, size, windows),
        block=block,
        places=places,
        positions=positions,
        numbers=numbers,
        of_block=of_block,
    )


def _size_for(segments: Sequence[int], small: Sequence[int]) -> int:
    """Return the smallest size with room for these segments, each from a block on."""
    size = size_of(sum(segments), small)
    while not _fits(segments, size):
        size = size_of(size + 1, small)
    return size


def _fits(segments: Iterable[int], size: int) -> bool:
    """Return whether a pass of this size has room for segments, each from a block on."""
    return sum(aligned(tokens, block_of(size)) for tokens in segments) <= size
