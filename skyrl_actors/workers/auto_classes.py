"""The class and the attention of a base model, which may have a vision tower."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from skyrl_actors.messages.image_form import VISION
from skyrl_actors.workers.attention import ATTENTION


def takes_images(config: Any) -> bool:
    """Return whether a model of this config has a vision tower that is computed here."""
    return config.model_type in VISION


def auto_class(config: Any) -> Any:
    """Return transformers' class that makes the model."""
    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def attention_for(config: Any, name: str = ATTENTION) -> Any:
    """Return what names the attention of the text. The tower's rows are images, not packed."""
    return {"text_config": name, "vision_config": "sdpa"} if takes_images(config) else name
