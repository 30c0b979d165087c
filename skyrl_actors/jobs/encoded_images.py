"""Images of datasets and environments as PNG or JPEG."""

import io
from pathlib import Path
from typing import Any

from PIL import Image

from skyrl_actors.api.chat_images import image_in
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.narrowing import is_mapping

AS_THEY_ARE = {"PNG": "png", "JPEG": "jpeg"}  # of Pillow -> of the wire
SHOWN_SIDE = 256  # pixels of an image beside samples


def encoded(value: Any, folder: Path | None = None) -> bytes:
    """Return an image as PNG or JPEG. Other formats become PNG.

    `value`: bytes; {"bytes", "path"} as Hugging Face datasets have it; an image of Pillow; a
    `data:` address; or a path, absolute or in `folder`. Without a folder, paths are refused.

    Raises:
        ValueError: The value is none of these, or no image.
    """
    content = value
    if is_mapping(value):
        content = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(content, Image.Image):
        return _png(content)
    if isinstance(content, str):
        content = _addressed(content, folder)
    if not isinstance(content, bytes):
        raise ValueError(
            f"the image is {str(value)[:80]}; use bytes, {{bytes}}, a data: address or a path"
        )
    return content if format_of(content) in AS_THEY_ARE.values() else _converted(content)


def format_of(content: bytes) -> str:
    """Return the format of an image, as the wire names it. Raises ValueError if it is none."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            return AS_THEY_ARE.get(image.format or "", "")
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be read: {error}") from None


def shown(content: bytes) -> bytes:
    """Return a small PNG of an image, to show next to samples."""
    with Image.open(io.BytesIO(content)) as image:
        small = image.convert("RGB")
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    return _png(small)


def _addressed(text: str, folder: Path | None) -> bytes:
    if text.startswith("data:"):
        try:
            return image_in(text)[0]
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
    if folder is None:
        raise ValueError(f"the image is {text[:80]!r}; use a data: address or bytes")
    try:
        return (folder / Path(text).expanduser()).read_bytes()
    except OSError as error:
        raise ValueError(f"the image {text[:200]}: {error.strerror or error}") from None


def _converted(content: bytes) -> bytes:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return _png(image)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be read: {error}") from None


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.convert("RGB").save(content, "PNG")
    return content.getvalue()
