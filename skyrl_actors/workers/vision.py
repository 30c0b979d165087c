"""Images in packed passes: features of a vision tower, and positions with three axes.

The features of an image depend on nothing but the image and the tower, because each image is
computed alone. A frozen tower's features are kept, so the passes of many tenants share them, and a
replay gives the same bits. A trained tower computes its images in each pass, from kept pixels.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.image_form import VISION
from skyrl_actors.messages.images import PlacedImage
from skyrl_actors.workers.auto_classes import takes_images
from skyrl_actors.workers.pixels import ImagePixels

KEPT_BYTES = 2**30  # of features


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=_Sized)


class Kept(Generic[T]):
    """The values that were used last, up to KEPT_BYTES, and always the newest one."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, key: str, make: Callable[[], T]) -> T:
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = make()
            while len(self._values) > 1 and sum(v.nbytes for v in self._values.values()) > (
                KEPT_BYTES
            ):
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return found

    def clear(self) -> None:
        self._values.clear()


@dataclass(frozen=True)
class Features:
    """What takes the places of an image's tokens, each [n, H]."""

    embedded: Tensor
    of_layers: tuple[Tensor, ...]  # added to the hidden states after the first layers (deepstack)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.embedded, *self.of_layers))


class VisionTower:
    """The vision tower of a model."""

    def __init__(self, module: Any, device: torch.device):
        self._model, self._device = module.model, device
        self._folder: str = module.config.name_or_path
        self.merge = int(module.config.vision_config.spatial_merge_size)
        self._features: Kept[Features] = Kept()
        self._values: Kept[NDArray[np.float32]] = Kept()

    def features(self, image: PlacedImage) -> Features:
        """Return the features by a frozen tower, without a gradient."""

        def compute() -> Features:
            with torch.no_grad():
                return self._computed(image, self._pixels(image))

        return self._features.get(image.digest, compute)

    def trained_features(self, image: PlacedImage) -> Features:
        """Return the features by a tower that is trained, with a gradient where it is enabled."""
        return self._computed(image, self._kept_pixels(image))

    def check(self, images: Iterable[PlacedImage], trained: bool) -> None:
        """Raise one of the errors of a bad image, if one of these cannot be computed.

        Features are kept for the passes that follow. Beyond what can be kept, an image is only
        decoded, so that the tower does not compute it twice.
        """
        num_bytes = 0
        for image in images:
            if trained:
                self._kept_pixels(image)
            elif num_bytes < KEPT_BYTES:
                num_bytes += self.features(image).nbytes
            else:
                self._pixels(image)

    def forget(self) -> None:
        """Free the features and the pixels."""
        self._features.clear()
        self._values.clear()

    @cached_property
    def pixels(self) -> ImagePixels:
        """The processor. Raises ConfigError if the base model's folder has none."""
        return ImagePixels(self._folder)

    def _kept_pixels(self, image: PlacedImage) -> NDArray[np.float32]:
        return self._values.get(image.digest, lambda: self._pixels(image))

    def _pixels(self, image: PlacedImage) -> NDArray[np.float32]:
        values, grid = self.pixels.of(image.content)
        if grid != image.grid:
            raise InternalError(
                f"an image has the grid {grid} here, and its tokens were counted for {image.grid}"
            )
        return values

    def _computed(self, image: PlacedImage, values: NDArray[np.float32]) -> Features:
        found = self._model.get_image_features(
            torch.from_numpy(values).to(self._device),
            torch.tensor([image.grid], device=self._device),
            return_dict=True,
        )
        layers = getattr(found, "deepstack_features", None) or ()
        return Features(found.pooler_output[0], tuple(each[0] for each in layers))


def tower_of(module: Any, device: torch.device) -> VisionTower | None:
    """Return the tower of a model that takes images.

    Raises ConfigError for a tower that is not computed here: adapters would be put on its layers.
    """
    if takes_images(module.config):
        return VisionTower(module, device)
    if getattr(module.config, "vision_config", None) is not None:
        raise ConfigError(
            f"{type(module).__name__} cannot be trained here: its vision tower is not computed; "
            f"choose a text model, or one of the types {', '.join(VISION)}"
        )
    return None


def positions_of(
    length: int, images: Iterable[tuple[int, tuple[int, int, int]]], merge: int
) -> NDArray[np.int64]:
    """Return the positions [3, length] of a row (M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1).

    `images`: the first token and the grid of each. The tokens of an image have the positions of
    their place in the grid, and the text after it continues from the largest of them.
    """
    found = np.empty((3, length), np.int64)
    at = position = 0
    for start, (t, h, w) in images:
        found[:, at:start] = np.arange(position, position + start - at)
        position += start - at
        sizes = (t, h // merge, w // merge)
        at = start + int(np.prod(sizes))
        found[:, start:at] = position + np.indices(sizes).reshape(3, -1)
        position += max(sizes[1:])
    found[:, at:] = np.arange(position, position + length - at)
    return found


def placed(features: Sequence[tuple[int, Features]], first: int, count: int) -> "Placed | None":
    """Return what belongs to tokens `first` to `first + count` of a pass, or None.

    `features`: those of each image, with the place of its first token in the pass.
    """
    places: list[Tensor] = []
    rows: list[tuple[Features, Tensor]] = []
    for start, own in features:
        inside = torch.arange(start, start + len(own.embedded)) - first
        kept = (inside >= 0) & (inside < count)
        if kept.any():
            places.append(inside[kept])
            rows.append((own, kept))
    if not rows:
        return None
    device = rows[0][0].embedded.device
    layers = [
        torch.cat([own.of_layers[i][kept.to(device)] for own, kept in rows])
        for i in range(len(rows[0][0].of_layers))
    ]
    embedded = torch.cat([own.embedded[kept.to(device)] for own, kept in rows])
    return Placed(torch.cat(places).to(device), embedded, layers)


@dataclass(frozen=True)
class Placed:
    """Features with their places among the tokens of a rank."""

    places: Tensor  # [n] int64
    embedded: Tensor  # [n, H]
    of_layers: list[Tensor]

    def into(self, embedded: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return embeddings [1, T, H] with these features, and the arguments for the layers."""
        replaced = embedded.index_put(
            (torch.zeros_like(self.places), self.places), self.embedded.to(embedded.dtype)
        )
        if not self.of_layers:
            return replaced, {}
        mask = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        mask[0, self.places] = True
        return replaced, {"visual_pos_masks": mask, "deepstack_visual_embeds": self.of_layers}
