"""How a base model's files are quantized, by its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_actors.messages.errors import ConfigError

KEY = "quantization_config"


@dataclass(frozen=True)
class Quantization:
    """A quantization that trainers read: mxfp4, or fp8 with a scale for each block of a matrix."""

    method: str
    block: tuple[int, int] | None = None  # rows and columns


def quantization_in(config: Mapping[str, Any], name: str) -> Quantization | None:
    """Return the quantization in a parsed config.json of the model `name`, or None.

    Raises:
        ConfigError: Trainers do not read it.
    """
    found: Mapping[str, Any] | None = config.get(KEY)
    if found is None:
        return None
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == "mxfp4":
        return Quantization(method)
    if method == "fp8" and block:
        return Quantization(method, (int(block[0]), int(block[1])))
    raise ConfigError(
        f"{name}: its weights are quantized with {method!r}, and trainers read mxfp4 and "
        "block-wise fp8; give a folder with bfloat16 weights"
    )
