"""The images of a batch: processed once, where they arrive, and unchanged from there on."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """One image of a batch."""

    digest: str  # hash of its content
    pixels: NDArray[np.float32]  # [patches, features of a patch]
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
    digests: tuple[str, ...]  # [distinct] hashes of their content
    pixels: tuple[NDArray[np.float32], ...]  # [distinct] each [patches, features of a patch]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.pixels)

    def between(self, start: int, stop: int) -> Iterator[PlacedImage]:
        """Yield the images of a row, whose flat positions are `start` to `stop`."""
        first, last = np.searchsorted(self.starts, (start, stop))
        for i in range(int(first), int(last)):
            own = int(self.which[i])
            t, h, w = self.grids[own].tolist()
            yield PlacedImage(
                digest=self.digests[own],
                pixels=self.pixels[own],
                grid=(t, h, w),
                start=int(self.starts[i]),
                num_tokens=int(self.counts[i]),
            )
