"""Tensors in pieces: each rank writes the ranges that it holds, and any rank reads any range.

A file holds pieces with the keys `<vector>/<name>@<start>`: elements of the flattened tensor `name`
from `start` on. Vectors are weights and moments. The metadata has the whole shapes. So a state that
was sharded over 8 ranks is read by 2 ranks, or by one, without a rank that held all of it.
"""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.workers.tensor_files import Shape, Source

Piece = tuple[str, int, Tensor]  # a tensor's name, and its elements [n] from this one on
Located = tuple[int, int, Any, str]  # start, stop, opened file, key


def write_pieces(
    path: Path,
    vectors: Mapping[str, Iterable[Piece]],
    shapes: Mapping[str, Shape],
    facts: Mapping[str, Any],
) -> None:
    """Write the pieces of one rank. `facts` can be encoded as JSON."""
    pieces = {
        f"{vector}/{name}@{start}": tensor.reshape(-1)
        for vector, parts in vectors.items()
        for name, start, tensor in parts
        if tensor.numel()
    }
    about = {"shapes": json.dumps(dict(shapes)), "facts": json.dumps(dict(facts))}
    save_file(pieces, path, metadata=about)


class ShardedFiles:
    """The files of all ranks. Close it, or use it in `with`."""

    def __init__(self, files: Sequence[Path]):
        self._stack = ExitStack()
        self._pieces: dict[str, dict[str, list[Located]]] = defaultdict(lambda: defaultdict(list))
        for file in files:
            opened: Any = self._stack.enter_context(safe_open(str(file), framework="pt"))
            about = opened.metadata()
            self.shapes = {name: tuple(s) for name, s in json.loads(about["shapes"]).items()}
            self.facts: dict[str, Any] = json.loads(about["facts"])
            for key in opened.keys():  # noqa: SIM118
                vector, _, rest = key.partition("/")
                name, _, start = rest.rpartition("@")
                (size,) = opened.get_slice(key).get_shape()
                place = int(start), int(start) + size, opened, key
                self._pieces[vector][name].append(place)
        for names in self._pieces.values():
            for located in names.values():
                located.sort(key=lambda piece: piece[:2])

    def vector(self, name: str) -> Source:
        """Return the tensors of one vector."""
        return _Vector(self._pieces[name], self.shapes)

    def __enter__(self) -> "ShardedFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Vector:
    """A source over the pieces of one vector."""

    def __init__(self, pieces: Mapping[str, list[Located]], shapes: Mapping[str, Shape]):
        self.shapes = shapes
        self._pieces = pieces

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements. Raises Corrupt where no file has one."""
        located = self._pieces.get(name, [])
        found: list[Tensor] = []
        at = start
        index = max(bisect_right([piece[0] for piece in located], start) - 1, 0)
        for first, last, file, key in located[index:]:
            if at >= stop or first > at:
                break
            if last > at:
                upto = min(last, stop)
                found.append(file.get_slice(key)[at - first : upto - first])
                at = upto
        if at < stop:
            raise Corrupt(
                f"no file has element {at} of {name} ({math.prod(self.shapes[name])} elements)"
            )
        return torch.cat(found) if found else torch.empty(0)
