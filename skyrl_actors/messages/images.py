"""The images of a batch: their encoded bytes, and the tokens that they take.

Bytes are small, so they travel and are stored; only a rank or an engine makes pixels of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.image_form import Grid


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a row."""

    place: int  # of its first token in the row
    digest: str
    content: bytes
    grid: Grid
    num_tokens: int


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


def images_of(rows: Sequence[Sequence[Picture]], lengths: Sequence[int]) -> Images | None:
    """Return the images of a batch whose rows have these lengths; None if there is none."""
    starts, counts, which = list[int](), list[int](), list[int]()
    numbers: dict[str, int] = {}
    distinct: list[Picture] = []
    for offset, pictures in zip(np.cumsum([0, *lengths]).tolist(), rows, strict=False):
        for picture in pictures:
            if picture.digest not in numbers:
                numbers[picture.digest] = len(distinct)
                distinct.append(picture)
            starts.append(offset + picture.place)
            counts.append(picture.num_tokens)
            which.append(numbers[picture.digest])
    if not starts:
        return None
    return Images(
        starts=np.asarray(starts, np.int64),
        counts=np.asarray(counts, np.int64),
        which=np.asarray(which, np.int64),
        grids=np.asarray([picture.grid for picture in distinct], np.int64),
        digests=tuple(picture.digest for picture in distinct),
        contents=tuple(picture.content for picture in distinct),
    )
