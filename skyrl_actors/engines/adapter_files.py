"""Check that an adapter's files are what the trainer wrote and fit the base model."""

import json
import logging
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.weights import ADAPTER_FILE, WeightManifest


class TensorSlice(Protocol):
    """One tensor of a safetensors file, before it is read."""

    def get_shape(self) -> list[int]: ...


class TensorFile(Protocol):
    """An open safetensors file, with the types that the library's annotations leave out."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> TensorSlice: ...


open_tensors = cast(Callable[[Path, str], AbstractContextManager[TensorFile]], safe_open)
log = logging.getLogger(__name__)


def check_adapter(manifest: WeightManifest, base_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidRequest for damaged files, a wrong checksum, or another base model's shapes."""
    file = Path(manifest.path) / ADAPTER_FILE
    try:
        json.loads((Path(manifest.path) / "adapter_config.json").read_text())
        with open_tensors(file, "np") as tensors:
            shapes = {
                name: tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118  not a mapping
            }
        for name, shape in shapes.items():
            layer, _, half = name.removeprefix("base_model.model.").partition(".lora_")
            base = base_shapes.get(f"{layer}.weight")
            if base is not None and (
                (half[:1] == "A" and shape[1] != base[1])
                or (half[:1] == "B" and shape[0] != base[0])
            ):
                raise ValueError(
                    f"{name} {list(shape)} does not match the base model's {layer} {list(base)}"
                )
        if any(zlib.crc32(file.read_bytes()) != entry.checksum for entry in manifest.tensors):
            raise ValueError(f"{file.name} has another checksum than the trainer wrote")
    except (OSError, ValueError, SafetensorError) as error:
        log.warning("adapter %s of %s: %s", manifest.version, manifest.path, error)
        # OSError and SafetensorError texts contain paths, which tenants must not see.
        reason = str(error) if isinstance(error, ValueError) else "its files are missing or damaged"
        raise InvalidRequest(f"adapter {manifest.version} cannot be loaded: {reason}") from error
