"""Export a version of a policy's weights so that an engine can map it.

An adapter becomes a peft folder, full weights become one flat file.
"""

import math
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_actors.messages.weights import ADAPTER_FILE, TensorEntry, WeightManifest
from skyrl_actors.storage.private_folders import make_folder
from skyrl_actors.workers import checkpoint
from skyrl_actors.workers.checkpoint import BaseFiles
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.tensor_files import Shape


def export(
    model: TrainedModel,
    base: BaseFiles,
    path: Path,
    version: str,
    writes: bool,
    checksums: bool,
    dtype: torch.dtype,
) -> WeightManifest | None:
    """Export the weights. Every rank calls this; the rank that writes returns the manifest."""
    started = time.perf_counter()
    if model.spec.lora is None:
        form = model.network.stored_form
        return export_flat(
            _stored(model),
            form.stored_shapes(model.state.shapes),
            path,
            version,
            writes,
            checksums,
            dtype,
        )
    if not writes:
        return None  # every rank has the whole adapter; one writes it
    make_folder(path.parent)
    checkpoint.save(model, base, path, "weights")
    size = sum(file.stat().st_size for file in path.iterdir())
    entries = (_whole_file(path / ADAPTER_FILE),) if checksums else ()
    return WeightManifest(
        version=version,
        kind="lora",
        path=str(path),
        num_bytes=size,
        tensors=entries,
        write_s=time.perf_counter() - started,
    )


def _stored(model: TrainedModel) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the weights as the family's files have them; None on ranks that do not write."""
    form, shapes = model.network.stored_form, model.state.shapes
    for name, tensor in model.state.tensors("weights"):
        if tensor is not None:
            yield from form.cut(name, tensor)
        else:
            yield from ((part.name, None) for part in form.parts(name, shapes[name]))


def _whole_file(file: Path) -> TensorEntry:
    content = file.read_bytes()
    return TensorEntry(file.name, (len(content),), "uint8", 0, len(content), zlib.crc32(content))


def described(
    shapes: Mapping[str, Shape], path: Path, version: str, dtype: torch.dtype
) -> WeightManifest:
    """Return the manifest of full weights as `export_flat` would write them, without writing."""
    entries: list[TensorEntry] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        entries.append(TensorEntry(name, tuple(shape), _named(dtype), size, num_bytes))
        size += num_bytes
    return WeightManifest(
        version=version, kind="full", path=str(path), num_bytes=size, tensors=tuple(entries)
    )


def export_flat(
    tensors: Iterable[tuple[str, Tensor | None]],
    shapes: Mapping[str, Shape],
    path: Path,
    version: str,
    writes: bool = True,
    checksums: bool = False,
    dtype: torch.dtype = torch.float32,
) -> WeightManifest | None:
    """Write the tensors one after another in `dtype`. Returns the manifest on the rank that writes.

    It uses plain writes, so a full disk raises an error. New pages of shared memory cost half as
    much as through a mapping.
    """
    started = time.perf_counter()
    tensors = iter(tensors)
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with _opened(staging) if writes else nullcontext() as file:
                entries = [
                    _written(file, name, shapes[name], tensor, dtype, checksums)
                    for name, tensor in tensors
                ]
        except Exception:
            # The other ranks continue to gather, so this rank takes part to the end.
            deque(tensors, maxlen=0)
            raise
        if not writes:
            return None
        os.replace(staging, path)
    finally:
        if writes:
            staging.unlink(missing_ok=True)
    found = tuple(entry for entry in entries if entry is not None)
    size = sum(entry.num_bytes for entry in found)
    return WeightManifest(
        version=version,
        kind="full",
        path=str(path),
        num_bytes=size,
        tensors=found,
        write_s=time.perf_counter() - started,
    )


def _opened(path: Path) -> FileIO:
    make_folder(path.parent)
    return path.open("wb", buffering=0)


def _written(
    file: FileIO | None,
    name: str,
    shape: Shape,
    tensor: Tensor | None,
    dtype: torch.dtype,
    checksums: bool,
) -> TensorEntry | None:
    if file is None or tensor is None:
        return None
    content = _content(tensor, dtype)
    start, left = file.tell(), content
    while left:
        left = left[file.write(left) :]
    checksum = zlib.crc32(content) if checksums else None
    return TensorEntry(name, tuple(shape), _named(dtype), start, len(content), checksum)


def _content(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    return tensor.detach().to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mapped_files(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Return the bytes of an exported file (under the key ""), or of the files in a folder.

    The arrays map the files.
    """
    if path.is_file():
        return {"": _mapped(path)}
    return {file.name: _mapped(file) for file in path.iterdir()}


def _mapped(file: Path) -> NDArray[np.uint8]:
    if not file.stat().st_size:
        return np.zeros(0, np.uint8)  # an empty file cannot be mapped
    return np.asarray(np.memmap(file, np.uint8, mode="r"))
