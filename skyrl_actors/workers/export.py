"""One version of a policy's weights where an engine can map it: a peft folder, or a flat file of all tensors."""

import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from skyrl_actors.messages.weights import TensorEntry, WeightManifest
from skyrl_actors.workers import checkpoint
from skyrl_actors.workers.checkpoint import BaseFiles
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.tensor_files import Shape


def export(model: TrainedModel, base: BaseFiles, path: Path, version: str, writes: bool) -> WeightManifest | None:
    """Called on every rank; the one that writes answers."""
    started = time.perf_counter()
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if model.spec.lora is None:
        return export_flat(model.state.tensors("weights"), model.state.shapes, path, version, writes)
    if not writes:
        return None  # every rank has the whole adapter
    checkpoint.save(model, base, path, "weights")
    size = sum(file.stat().st_size for file in path.iterdir())
    return WeightManifest(version, "lora", str(path), size, write_s=time.perf_counter() - started)


def export_flat(
    tensors: Iterable[tuple[str, Tensor | None]], shapes: Mapping[str, Shape], path: Path, version: str, writes: bool = True
) -> WeightManifest | None:
    """float32, tensor behind tensor, through a mapping of the file: no second copy of the weights is made."""
    started = time.perf_counter()
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    mapped = torch.from_file(str(staging), shared=True, size=sum(sizes.values()), dtype=torch.float32) if writes else None
    entries, start = [], 0
    for name, tensor in tensors:
        if mapped is not None and tensor is not None:
            mapped[start : start + sizes[name]].copy_(tensor.reshape(-1))
            entries.append(TensorEntry(name, tuple(shapes[name]), "float32", start * 4))
        start += sizes[name]
    if not writes:
        return None
    del mapped
    os.replace(staging, path)
    return WeightManifest(version, "full", str(path), start * 4, tuple(entries), time.perf_counter() - started)
