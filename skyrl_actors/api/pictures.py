"""Images of a request: check and count them before anything is queued."""

import hashlib
import io
import struct
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from skyrl_actors.api.image_folder import image_at
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.image_form import MOST_ASPECT, Grid, ImageForm
from skyrl_actors.messages.images import Picture

MAGIC = (b"\x89PNG", b"\xff\xd8\xff")  # what these files begin with
FORMATS = {"png": "PNG", "jpeg": "JPEG"}  # of the wire -> of Pillow
SCAN = b"\xff\xda"  # begins a scan of a JPEG, and is nowhere else in its data
MOST_SCANS = 100  # a progressive file has about ten; each takes as long as the first
DAMAGED = (  # what Pillow raises for damaged files
    *(OSError, ValueError, SyntaxError, AssertionError, LookupError, TypeError, ArithmeticError),
    *(EOFError, struct.error, zlib.error, Image.DecompressionBombError),
)
NO_IMAGES = "the base model takes no images; send text, or serve one with a vision tower"


@dataclass
class PictureReader:
    """Check the images of one request. `form` None: the base model takes none."""

    form: ImageForm | None
    limits: LimitsConfig
    folder: Path | None = None  # of images that clients name
    num_images: int = 0
    num_pixels: int = 0  # of different images
    seen: dict[str, Grid] = field(default_factory=dict[str, Grid])
    located: dict[str, bytes] = field(default_factory=dict[str, bytes])  # by their paths

    def read(
        self, what: str, place: int, content: bytes, format: str, expected_tokens: int | None
    ) -> Picture:
        """Return an image whose first token is at `place`. Raises InvalidRequest; `what` names it.

        An image is decoded once in a request, however often it is in it.
        """
        form = self._taken(what)
        self.num_images += 1
        if self.num_images > self.limits.images:
            raise InvalidRequest(
                f"the request has more than {self.limits.images} images (limits.images); send fewer"
            )
        digest = hashlib.sha256(content).hexdigest()
        grid = self.seen.get(digest)
        if grid is None:
            grid = self.seen[digest] = self._checked(what, content, format, form)
        count = form.num_tokens(grid)
        if expected_tokens is not None and expected_tokens != count:
            raise InvalidRequest(
                f"{what} takes {count} tokens, and expected_tokens is {expected_tokens}; use the "
                "image processor of this base model, or leave out expected_tokens"
            )
        return Picture(place, digest, content, grid, count)

    def located_at(self, what: str, location: object) -> bytes:
        """Return an image of the service's folder, which is read once in a request.

        A pointer is short, so what many of them name is bounded as a body is.
        """
        self._taken(what)
        if isinstance(location, str) and location in self.located:
            return self.located[location]
        content = image_at(self.folder, what, location, self.limits.image_bytes)
        self.located[str(location)] = content
        if sum(map(len, self.located.values())) > self.limits.body_bytes:
            raise InvalidRequest(
                f"{what}: the images of the service's folder in this request have more than "
                f"{self.limits.body_bytes} bytes together (limits.body_bytes); send fewer"
            )
        return content

    def _taken(self, what: str) -> ImageForm:
        if self.form is None:
            raise InvalidRequest(f"{what}: {NO_IMAGES}")
        return self.form

    @property
    def token(self) -> int:
        """The placeholder of the base model."""
        assert self.form is not None
        return self.form.token

    def may_decode(self, body: bytes, is_json: bool) -> bool:
        """Return whether a body can have images, whose decoding takes long for few bytes."""
        return self.form is not None and (is_json or any(magic in body for magic in MAGIC))

    def check_text(self, what: str, tokens: NDArray[np.int32]) -> None:
        """Raise InvalidRequest for a placeholder, which would have no image."""
        if self.form is not None and (tokens == self.form.token).any():
            raise InvalidRequest(
                f"{what}: the token id {self.form.token} stands for an image; send an image chunk "
                "in its place"
            )

    def _checked(self, what: str, content: bytes, format: str, form: ImageForm) -> Grid:
        """Return the grid of an image that can be decoded whole."""
        if format not in FORMATS:
            raise InvalidRequest(f"{what} has format {format!r}; use {' or '.join(FORMATS)}")
        if len(content) > self.limits.image_bytes:
            raise InvalidRequest(
                f"{what} has {len(content)} bytes; at most {self.limits.image_bytes} are allowed "
                "(limits.image_bytes)"
            )
        if format == "jpeg" and content.count(SCAN) > MOST_SCANS:
            raise InvalidRequest(f"{what} has more than {MOST_SCANS} scans; store it otherwise")
        try:
            with (
                warnings.catch_warnings(),
                Image.open(io.BytesIO(content), formats=[FORMATS[format]]) as image,
            ):
                warnings.simplefilter("ignore")  # of Pillow, about sizes that are checked here
                width, height = image.size
                if width * height > self.limits.image_pixels:
                    raise InvalidRequest(
                        f"{what} has {width} x {height} pixels; at most "
                        f"{self.limits.image_pixels} are allowed (limits.image_pixels)"
                    )
                self.num_pixels += width * height
                if self.num_pixels > self.limits.request_pixels:
                    raise InvalidRequest(
                        f"the images of the request have more than {self.limits.request_pixels} "
                        "pixels together (limits.request_pixels); send fewer"
                    )
                grid = form.grid(width, height)
                if max(grid[1:]) > MOST_ASPECT * min(grid[1:]):
                    raise ValueError("after it was resized, it is too long for its width")
                image.convert("RGB")  # as a rank does
        except InvalidRequest:
            raise
        except DAMAGED as error:
            raise InvalidRequest(f"{what} is not a {format} image: {error}") from None
        return grid


class Row:
    """The tokens and images of a datum or a prompt, chunk by chunk. `what` names it."""

    def __init__(self, what: str, reader: PictureReader):
        self.what, self._reader = what, reader
        self._parts: list[NDArray[np.int32]] = []
        self._pictures: list[Picture] = []
        self._length = 0

    def add_text(self, tokens: NDArray[np.int32]) -> None:
        if tokens.ndim != 1:
            raise InvalidRequest(f"{self.what}: tokens must be a flat list of whole numbers")
        self._reader.check_text(self.what, tokens)
        self._add(tokens)

    def add_image(self, content: bytes, format: str, expected_tokens: int | None) -> None:
        """Add placeholders for an image. Raises InvalidRequest if it is not served."""
        what = f"{self.what}: image {len(self._pictures)}"
        picture = self._reader.read(what, self._length, content, format, expected_tokens)
        self._pictures.append(picture)
        self._add(np.full(picture.num_tokens, self._reader.token, np.int32))

    def add_pointer(self, location: object, format: str, expected_tokens: int | None) -> None:
        """Add placeholders for an image in the service's folder. Raises InvalidRequest."""
        what = f"{self.what}: image {len(self._pictures)}"
        self.add_image(self._reader.located_at(what, location), format, expected_tokens)

    def _add(self, tokens: NDArray[np.int32]) -> None:
        self._parts.append(tokens)
        self._length += len(tokens)

    def prompt(self) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        """Return the tokens and the images of a prompt."""
        tokens = [token for part in self._parts for token in part.tolist()]
        return tuple(tokens), tuple(self._pictures)

    def example(self, fields: dict[str, NDArray[np.generic]]) -> Example:
        """Return the datum with these inputs."""
        tokens = np.concatenate(self._parts) if self._parts else np.zeros(0, np.int32)
        return Example(tokens, fields, tuple(self._pictures))
