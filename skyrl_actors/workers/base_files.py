"""The tensors of a base model's files, dequantized where they are quantized.

Some models are published with quantized weights only (gpt-oss: MXFP4; DeepSeek-V3: FP8). Engines
sample from these. Trainers compute with the numbers that they stand for. A rank dequantizes only
the part that it reads.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_actors.messages.quantization import KEY, Quantization, quantization_in
from skyrl_actors.transport.mxfp4 import dequantized_mxfp4
from skyrl_actors.workers.tensor_files import Shape, Source, TensorFiles, whole

CONFIG = "config.json"
BLOCKS, SCALES = "_blocks", "_scales"  # of MXFP4
SCALE_INV = "_scale_inv"  # of FP8


def quantization_of(folder: Path) -> Quantization | None:
    """Return the quantization of a model's files. Raises ConfigError if trainers do not read it."""
    return quantization_in(json.loads((folder / CONFIG).read_text()), folder.name)


class BaseTensors:
    """The tensors of a base model's folder. Close it, or use it in `with`."""

    def __init__(self, folder: Path):
        quantization = quantization_of(folder)
        self._files = TensorFiles(folder)
        self._own: Source = self._files
        if quantization is not None:
            block = quantization.block
            self._own = Fp8Tensors(self._files, block) if block else Mxfp4Tensors(self._files)
        self.shapes = self._own.shapes

    def range(self, name: str, start: int, stop: int) -> Tensor:
        return self._own.range(name, start, stop)

    def __enter__(self) -> "BaseTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()


class Mxfp4Tensors:
    """Experts in MXFP4: 32 numbers of 4 bits share a scale of 8 bits.

    `x_blocks` [E, out, in / 32, 16] and `x_scales` [E, out, in / 32], both uint8, are `x`
    [E, in, out] in bfloat16, which holds each of its numbers exactly.
    """

    def __init__(self, files: Source):
        self._files = files
        self._packed = {
            name.removesuffix(BLOCKS): shape
            for name, shape in files.shapes.items()
            if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in files.shapes
        }
        halves = {name + half for name in self._packed for half in (BLOCKS, SCALES)}
        self.shapes: dict[str, Shape] = {
            name: shape for name, shape in files.shapes.items() if name not in halves
        } | {name: (e, n * 2 * b, out) for name, (e, out, n, b) in self._packed.items()}

    def range(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._packed:
            return self._files.range(name, start, stop)
        _, out, blocks, width = self._packed[name]
        size = math.prod(self.shapes[name][1:])
        first, last = start // size, max(-(-stop // size), start // size)
        bits, scales = (
            self._files.range(name + half, first * each, last * each)
            for half, each in ((BLOCKS, out * blocks * width), (SCALES, out * blocks))
        )
        values = dequantized_mxfp4(bits.view(-1, width), scales.view(-1))
        experts = values.view(last - first, out, 2 * blocks * width).mT.reshape(-1)
        return experts[start - first * size : stop - first * size]


class Fp8Tensors:
    """Matrices in FP8 (E4M3): each block of rows and columns shares a float32 scale.

    `x` [rows, columns] and `x_scale_inv` [⌈rows / r⌉, ⌈columns / c⌉] are `x` in float32.
    """

    def __init__(self, files: Source, block: tuple[int, int]):
        self._files, self._block = files, block
        self._scaled = {
            name.removesuffix(SCALE_INV) for name in files.shapes if name.endswith(SCALE_INV)
        }
        self.shapes: dict[str, Shape] = {
            name: shape for name, shape in files.shapes.items() if not name.endswith(SCALE_INV)
        }

    def range(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._scaled:
            return self._files.range(name, start, stop)
        columns = self.shapes[name][1]
        first, last = start // columns, max(-(-stop // columns), start // columns)
        values = self._files.range(name, first * columns, last * columns).view(-1, columns).float()
        scales = whole(self._files, name + SCALE_INV).float()
        rows = torch.arange(first, last) // self._block[0]
        wide = scales[rows].repeat_interleave(self._block[1], 1)[:, :columns]
        return (values * wide).reshape(-1)[start - first * columns : stop - first * columns]


def copy_model_files(base_folder: Path, folder: Path) -> None:
    """Copy config and tokenizer files, but no weights, so that a dense model can be loaded."""
    for file in base_folder.iterdir():
        if (
            file.is_file()
            and file.suffix in (".json", ".jinja", ".txt", ".model")
            and "index" not in file.name
        ):
            shutil.copyfile(file, folder / file.name)
    content: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    if content.pop(KEY, None) is not None:
        (folder / CONFIG).write_text(json.dumps(content, indent=2))
