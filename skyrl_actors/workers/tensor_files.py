"""Read ranges of tensors from safetensors files, and write such files tensor by tensor.

So a rank reads only its own part, and a model larger than memory can be written.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.storage.model_files import weight_files

Shape = tuple[int, ...]
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
}


class Source(Protocol):
    """Named tensors whose ranges can be read separately."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements from start to stop of the flattened tensor, on the host."""
        ...


def whole(source: Source, name: str) -> Tensor:
    """Return the whole tensor, on the host."""
    shape = source.shapes[name]
    return source.range(name, 0, math.prod(shape)).view(shape)


class TensorFiles:
    """The tensors of one safetensors file, or of a model's folder.

    Close it, or use it in `with`.
    """

    def __init__(self, path: Path, pattern: str | None = None):
        if path.is_file():
            files = [path]
        else:
            files = sorted(path.glob(pattern)) if pattern else weight_files(path)
        if not files:
            raise FileNotFoundError(f"{path} has no .safetensors file")
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, Shape] = {}
        for file in files:
            opened: Any = self._stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118
                self._files[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def range(self, name: str, start: int, stop: int) -> Tensor:
        shape, part = self.shapes[name], self._files[name].get_slice(name)
        if not shape:
            return self._files[name].get_tensor(name).reshape(1)[start:stop]
        row = math.prod(shape[1:])
        if not row or start >= stop:
            return self._files[name].get_tensor(name)[:0].reshape(-1)
        first, last = start // row, -(-stop // row)
        return part[first:last].reshape(-1)[start - first * row : stop - first * row]

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Joined:
    """Tensors that are adjacent in one vector of another source, in this order."""

    def __init__(self, source: Source, key: str, shapes: Mapping[str, Shape]):
        self.shapes = shapes
        self._source, self._key = source, key
        self._starts: dict[str, int] = {}
        start = 0
        for name, shape in shapes.items():
            self._starts[name] = start
            start += math.prod(shape)
        if (size := math.prod(source.shapes[key])) != start:
            raise InternalError(f"{key} has {size} numbers, and the model has {start}")

    def range(self, name: str, start: int, stop: int) -> Tensor:
        offset = self._starts[name]
        return self._source.range(self._key, offset + start, offset + stop)


class Renamed:
    """A source with other names: `names` maps the new names to those of the source."""

    def __init__(self, source: Source, names: Mapping[str, str]):
        self.shapes = {ours: source.shapes[theirs] for ours, theirs in names.items()}
        self._source, self._names = source, names

    def range(self, name: str, start: int, stop: int) -> Tensor:
        return self._source.range(self._names[name], start, stop)


class InMemory:
    """A source over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors

    def range(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].reshape(-1)[start:stop]


class MergedSource:
    """Several sources as one."""

    def __init__(self, sources: Sequence[Source]):
        self._of = {name: source for source in sources for name in source.shapes}
        self.shapes = {name: source.shapes[name] for name, source in self._of.items()}

    def range(self, name: str, start: int, stop: int) -> Tensor:
        return self._of[name].range(name, start, stop)


class Mixed:
    """(1 − share) of one source plus share of another, in float32."""

    def __init__(self, base: Source, other: Source, share: float):
        self.shapes = other.shapes
        self._base, self._other, self._share = base, other, share

    def range(self, name: str, start: int, stop: int) -> Tensor:
        base, other = (
            self._base.range(name, start, stop).float(),
            self._other.range(name, start, stop).float(),
        )
        return torch.lerp(base, other, self._share)


class TensorWriter:
    """Write one safetensors file with a fixed layout, through a mapping, in any order."""

    def __init__(self, path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._spans: dict[str, tuple[int, int]] = {}
        width, start = dtype.itemsize, 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            self._spans[name] = (start, stop)
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start * width, stop * width],
            }
            start = stop
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)  # aligns the data
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            # A full disk raises an error here; a later write through the mapping would crash.
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + start * width)
        mapped = torch.from_file(
            str(path), shared=True, size=8 + len(text) + start * width, dtype=torch.uint8
        )
        self._data = mapped[8 + len(text) :].view(dtype)

    def put(self, name: str, tensor: Tensor) -> None:
        start, stop = self._spans[name]
        self._data[start:stop].copy_(tensor.detach().reshape(-1))


def shards_of(shapes: Mapping[str, Shape], item_bytes: int, limit_bytes: int) -> list[list[str]]:
    """Split the names, in order, into files of at most `limit_bytes`.

    A larger tensor gets a file of its own.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * item_bytes
        if shards[-1] and size + own > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    return shards


def write_index(
    folder: Path, files: Sequence[str], shards: Sequence[Sequence[str]], num_bytes: int
) -> None:
    """Write the index of a model in several files, in the format of transformers and vLLM."""
    names = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    content = {"metadata": {"total_size": num_bytes}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
