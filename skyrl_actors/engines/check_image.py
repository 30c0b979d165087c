"""The image in the prompt of the logprob check, for a base model that takes images."""

import hashlib
import io
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from skyrl_actors.messages.image_form import ImageForm, form_in
from skyrl_actors.messages.images import Picture

MOST_TOKENS = 256


def image_tokens(base_folder: Path, max_model_len: int) -> tuple[int, ...]:
    """Return the tokens of the image, between the marks of the base model.

    There are none if the base takes no images, or if they would need a quarter of a sequence.
    """
    form = form_in(base_folder)
    if form is None:
        return ()
    count = form.num_tokens(form.grid(*_size(form)))
    if count > min(MOST_TOKENS, max_model_len // 4):
        return ()
    config = json.loads((base_folder / "config.json").read_text())
    start, end = (config.get(f"vision_{name}_token_id") for name in ("start", "end"))
    return (*([start] if start else []), *[form.token] * count, *([end] if end else []))


def pictures_in(prompt: Sequence[int], form: ImageForm | None) -> tuple[Picture, ...]:
    """Return the image of a prompt that begins with `image_tokens`; none for another prompt."""
    if form is None or form.token not in prompt:
        return ()
    size = _size(form)
    grid = form.grid(*size)
    content = _drawn(*size)
    digest = hashlib.sha256(content).hexdigest()
    return (Picture(prompt.index(form.token), digest, content, grid, form.num_tokens(grid)),)


def _size(form: ImageForm) -> tuple[int, int]:
    """Return width and height: the smallest image with more columns of tokens than rows."""
    factor = form.patch * form.merge
    rows = max(1, math.isqrt(math.ceil(form.least / factor**2)))
    columns = max(rows + 1, math.ceil(form.least / factor**2 / rows))
    return columns * factor, rows * factor


@lru_cache(maxsize=4)
def _drawn(width: int, height: int) -> bytes:
    """Return a PNG of coloured stripes and a gradient."""
    y, x = np.indices((height, width))
    pixels = np.stack([255 * x // width, 255 * y // height, (x * 7 + y * 13) % 256], axis=-1)
    content = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(content, "PNG")
    return content.getvalue()
