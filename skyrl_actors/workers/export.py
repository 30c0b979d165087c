"""One version of a policy's weights where an engine can map it: a peft folder, or a flat file of all tensors."""

import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from skyrl_actors.messages.weights import TensorEntry, WeightManifest
from skyrl_actors.workers import checkpoint
from skyrl_actors.workers.checkpoint import BaseFiles
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.tensor_files import Shape


def export(
    model: TrainedModel, base: BaseFiles, path: Path, version: str, writes: bool, checksums: bool
) -> WeightManifest | None:
    """Called on every rank; the one that writes answers."""
    started = time.perf_counter()
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if model.spec.lora is None:
        return export_flat(model.state.tensors("weights"), model.state.shapes, path, version, writes, checksums)
    if not writes:
        return None  # every rank has the whole adapter
    checkpoint.save(model, base, path, "weights")
    size = sum(file.stat().st_size for file in path.iterdir())
    return WeightManifest(version, "lora", str(path), size, write_s=time.perf_counter() - started)


def export_flat(
    tensors: Iterable[tuple[str, Tensor | None]],
    shapes: Mapping[str, Shape],
    path: Path,
    version: str,
    writes: bool = True,
    checksums: bool = False,
) -> WeightManifest | None:
    """float32, tensor behind tensor, through a mapping of the file: no second copy of the weights is made."""
    started = time.perf_counter()
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        entries, size = _written(tensors, shapes, staging if writes else None, checksums)
        if not writes:
            return None
        os.replace(staging, path)
    finally:
        if writes:
            staging.unlink(missing_ok=True)
    return WeightManifest(version, "full", str(path), size, tuple(entries), time.perf_counter() - started)


def _written(
    tensors: Iterable[tuple[str, Tensor | None]], shapes: Mapping[str, Shape], file: Path | None, checksums: bool
) -> tuple[list[TensorEntry], int]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total, mapped = sum(sizes.values()), None
    if file is not None:
        with file.open("wb") as made:
            os.posix_fallocate(made.fileno(), 0, total * 4)  # memory that is full is an error here, not a death there
        mapped = torch.from_file(str(file), shared=True, size=total, dtype=torch.float32)
    entries, start = [], 0
    for name, tensor in tensors:
        if mapped is not None and tensor is not None:
            written = mapped[start : start + sizes[name]].copy_(tensor.reshape(-1))
            checksum = zlib.crc32(written.numpy().data) if checksums else None
            entries.append(TensorEntry(name, tuple(shapes[name]), "float32", start * 4, sizes[name] * 4, checksum))
        start += sizes[name]
    return entries, start * 4
