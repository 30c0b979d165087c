"""Images of chat messages: bytes in `data:` addresses, and their places in the prompt."""

import base64
import re
from collections.abc import Sequence

import numpy as np

from skyrl_actors.api.pictures import PictureReader, Row
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.images import Picture

DATA_URL = re.compile(r"data:image/(png|jpeg|jpg);base64,", re.IGNORECASE)


def image_in(url: str) -> tuple[bytes, str]:
    """Return the content and the format of an image. Raises InvalidRequest."""
    found = DATA_URL.match(url)
    if found is None:
        raise InvalidRequest(
            f"image_url {url[:40]!r}: use data:image/png;base64,… or data:image/jpeg;base64,…; "
            "the service opens no addresses"
        )
    try:
        content = base64.b64decode(url[found.end() :], validate=True)
    except ValueError as error:
        raise InvalidRequest(f"image_url has no valid base64: {error}") from None
    return content, found[1].lower().replace("jpg", "jpeg")


def with_images(
    tokens: Sequence[int], urls: Sequence[str], reader: PictureReader
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Expand the placeholders of a prompt whose images are `data:` addresses; see `expanded`."""
    return expanded(tokens, [image_in(url) for url in urls], reader)


def expanded(
    tokens: Sequence[int], images: Sequence[tuple[bytes, str]], reader: PictureReader
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Expand the placeholder of each image, given as content and format, of a prompt.

    The base model takes images. Its chat template puts one placeholder in the place of each.

    Raises:
        InvalidRequest: An image is not served, or the prompt has another number of placeholders.
    """
    ids = np.asarray(tokens, np.int32)
    places = np.flatnonzero(ids == reader.token)
    if len(places) != len(images):
        raise InvalidRequest(
            f"the chat template puts {len(places)} images into a prompt of messages with "
            f"{len(images)}; do not write the placeholder of images as text"
        )
    row = Row("the messages", reader)
    first, *others = np.split(ids, places)
    row.add_text(first)
    for image, text in zip(images, others, strict=True):
        row.add_image(*image, expected_tokens=None)
        row.add_text(text[1:])  # without the placeholder
    return row.prompt()
