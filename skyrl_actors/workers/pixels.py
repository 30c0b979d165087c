"""Pixels of encoded images, by the processor that lies beside a base model."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.image_form import Grid, form_in


class ImagePixels:
    """Transformers' processor of a base model, without torchvision."""

    def __init__(self, folder: str):
        """Raises ConfigError if the folder has no processor."""
        try:
            self.form = form_in(Path(folder))
            self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder} has a vision tower, and its image processor cannot be read: {error}; "
                "copy preprocessor_config.json of the model into the folder"
            ) from None

    @property
    def settings(self) -> tuple[int, int, int, int]:
        """What decides the count of tokens: patch, merge, least and most pixels."""
        own = self._processor
        size = (own.size["shortest_edge"], own.size["longest_edge"])
        return (own.patch_size, own.merge_size, *size)

    def of(self, content: bytes) -> tuple[NDArray[np.float32], Grid]:
        """Return the patches [n, features of a patch] of an image, and their grid."""
        with Image.open(io.BytesIO(content)) as image:
            found = self._processor(images=[image.convert("RGB")], return_tensors="np")
        t, h, w = found["image_grid_thw"][0].tolist()
        return found["pixel_values"], (t, h, w)

    def resized(self, content: bytes) -> Image.Image:
        """Return an image with the size that the processor gives it, by the processor's filter."""
        assert self.form is not None
        with Image.open(io.BytesIO(content)) as image:
            _, rows, columns = self.form.grid(*image.size)
            size = (columns * self.form.patch, rows * self.form.patch)
            return image.convert("RGB").resize(size, self._processor.resample)
