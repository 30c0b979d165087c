"""How many tokens an image takes in a base model, from the files beside it (pure).

The formula is that of Qwen2-VL's image processor (arXiv 2409.12191, section 2.1): both sides become
multiples of a factor, and the area is brought into bounds with about the same aspect ratio. A rank
compares it at its start with transformers' processor.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_actors.messages.errors import ConfigError

# Model types whose vision tower is computed here. Their positions have three axes, and features of
# the tower take the places of an image's tokens.
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PROCESSOR, NESTED = "preprocessor_config.json", "processor_config.json"
MOST_ASPECT = 200  # of the longer side to the shorter one
Grid = tuple[int, int, int]  # patches in time, height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """The images that a base model takes."""

    token: int  # id of the placeholder
    patch: int  # pixels on each side
    merge: int  # patches on each side of a token
    least: int  # pixels of an image after it was resized
    most: int

    def grid(self, width: int, height: int) -> Grid:
        """Return the grid of an image of this size in pixels. Raises ValueError for a thin one."""
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise ValueError(
                f"its sides are {width} and {height} pixels, and one may be at most "
                f"{MOST_ASPECT} times as long as the other"
            )
        factor = self.patch * self.merge
        sides = [round(side / factor) * factor for side in (height, width)]
        if math.prod(sides) > self.most:
            scale = math.sqrt(height * width / self.most)
            sides = [
                max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
            ]
        elif math.prod(sides) < self.least:
            scale = math.sqrt(self.least / (height * width))
            sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
        return 1, sides[0] // self.patch, sides[1] // self.patch

    def num_tokens(self, grid: Grid) -> int:
        return math.prod(grid) // self.merge**2


def form_in(folder: Path) -> ImageForm | None:
    """Read how a base model takes images; None if it takes none.

    Raises ConfigError if its processor's file is missing or damaged.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config.get("model_type") not in VISION:
        return None
    try:
        own = _processor_in(folder)
        size: dict[str, int] = own.get("size") or {}
        return ImageForm(
            token=int(config["image_token_id"]),
            patch=int(own["patch_size"]),
            merge=int(own["merge_size"]),
            least=int(own.get("min_pixels") or size["shortest_edge"]),
            most=int(own.get("max_pixels") or size["longest_edge"]),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder} has a vision tower, and its image processor cannot be read: "
            f"{type(error).__name__}: {error}; copy {PROCESSOR} of the model into the folder"
        ) from None


def _processor_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the image processor, from the file that transformers prefers."""
    nested = folder / NESTED
    if nested.is_file() and (own := json.loads(nested.read_text()).get("image_processor")):
        return own
    return json.loads((folder / PROCESSOR).read_text())
