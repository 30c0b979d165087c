"""The config of a service's base model."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig

BASE_NAME = (
    "name that clients use for the base model; for `pretrained` without a path also its name on "
    "the hub"
)


class NamedBase(FrozenConfig):
    """The key that all base models share."""

    name: str = Field(description=BASE_NAME)


class MadeBase(NamedBase):
    """The keys of base models that are made on this machine."""

    warmup_steps: int = Field(
        default=150,
        ge=0,
        description="supervised steps on demonstrations with errors; 0 = random weights",
    )


class TinyBase(MadeBase):
    """A small model of the Qwen3 architecture with a byte-level tokenizer.

    It is trained on this machine and cached in `~/.cache/skyrl-actors`, or below XDG_CACHE_HOME.
    """

    type: Literal["tiny"] = "tiny"
    name: str = Field(default="skyrl-actors/tiny", description=BASE_NAME)


class TinyMoeBase(MadeBase):
    """The tiny model as a mixture: 128 experts in each layer, 8 of them for each token."""

    type: Literal["tiny_moe"] = "tiny_moe"
    name: str = Field(default="skyrl-actors/tiny-moe", description=BASE_NAME)


class TinyVlBase(MadeBase):
    """A small model of the Qwen3-VL architecture, trained on drawings of coloured shapes."""

    type: Literal["tiny_vl"] = "tiny_vl"
    name: str = Field(default="skyrl-actors/tiny-vl", description=BASE_NAME)


class PretrainedBase(NamedBase):
    """A model in Hugging Face format: a folder, or a name on the Hugging Face hub."""

    type: Literal["pretrained"] = "pretrained"
    path: Path | None = Field(
        default=None, description="folder of the model; null = download it by name"
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit on the hub; null = the default branch"
    )


BaseModelConfig = Annotated[
    TinyBase | TinyMoeBase | TinyVlBase | PretrainedBase, Field(discriminator="type")
]
