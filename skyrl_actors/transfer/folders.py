"""Describe checkpoint folders as manifests.

A safetensors file is a flat file with a header, so an engine can map it as it is.
"""

import json
import struct
from pathlib import Path

from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.weights import TensorEntry, WeightManifest
from skyrl_actors.storage.model_files import weight_files

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",  # of quantized weights
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",  # of buffers
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def manifests(folder: Path, version: str) -> tuple[WeightManifest, ...]:
    """Return the manifests of an adapter in peft's format, or of full weights."""
    if not (folder / "adapter_config.json").exists():
        return full_manifests(folder, version)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return (WeightManifest(version=version, kind="lora", path=str(folder), num_bytes=size),)


def full_manifests(folder: Path, version: str) -> tuple[WeightManifest, ...]:
    """Return one manifest for each safetensors file of a Hugging Face folder."""
    files = weight_files(folder)
    if not files:
        raise NotFound(f"{folder} has no *.safetensors")
    return tuple(_manifest_of(file, version) for file in files)


def _manifest_of(file: Path, version: str) -> WeightManifest:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    tensors: list[TensorEntry] = []
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors.append(
                TensorEntry(
                    name,
                    tuple(entry["shape"]),
                    DTYPES[entry["dtype"]],
                    8 + length + start,
                    end - start,
                )
            )
    return WeightManifest(
        version=version,
        kind="full",
        path=str(file),
        num_bytes=file.stat().st_size,
        tensors=tuple(tensors),
    )
