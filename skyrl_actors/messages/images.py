"""The images of a batch: their encoded bytes, and the tokens that they take.

Bytes are small, so they travel and are stored; only a rank or an engine makes pixels of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """One image of a batch."""

    digest: str  # SHA-256 of its content
    content: bytes  # PNG or JPEG
    grid: tuple[int, int, int]  # patches in time, height and width
    start: int  # flat position of its first token
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a batch with I images, in the order of their tokens.

    Each takes adjacent positions of one row, which hold the placeholder token of the model. Equal
    images are held once.
    """

    starts: NDArray[np.int64]  # [I] flat position of its first token
    counts: NDArray[np.int64]  # [I] its tokens
    which: NDArray[np.int64]  # [I] its index in the following fields
    grids: NDArray[np.int64]  # [distinct, 3] patches in time, height and width
    digests: tuple[str, ...]  # [distinct] SHA-256 of their contents
    contents: tuple[bytes, ...]  # [distinct] PNG or JPEG

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.contents))

    def between(self, start: int, stop: int) -> Iterator[PlacedImage]:
        """Yield the images of a row, whose flat positions are `start` to `stop`."""
        first, last = np.searchsorted(self.starts, (start, stop))
        for i in range(int(first), int(last)):
            own = int(self.which[i])
            t, h, w = self.grids[own].tolist()
            yield PlacedImage(
                digest=self.digests[own],
                content=self.contents[own],
                grid=(t, h, w),
                start=int(self.starts[i]),
                num_tokens=int(self.counts[i]),
            )
