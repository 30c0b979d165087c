"""Tiny random models whose files are quantized, each beside a dense one with the same numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.workers.tiny_models import make

FP8_BLOCK = (16, 24)  # does not divide all matrices
NOT_QUANTIZED = ("norm", "embed", "lm_head", "sinks", "router", "bias")


def quantized(name: str, method: str, folder: Path) -> tuple[Path, Path]:
    """Make the model with quantized weights, and the same with the numbers that they stand for."""
    source = make(name, folder / "made")
    return copies(source, method, folder)


def copies(source: Path, method: str, folder: Path) -> tuple[Path, Path]:
    found = load_file(source / "model.safetensors")
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in found.items():
        if any(part in name for part in NOT_QUANTIZED):
            # Published ones are bfloat16, and vLLM keeps biases so.
            packed[name] = dense[name] = tensor.bfloat16().float()
        elif method == "fp8":
            packed |= (halves := _fp8(name, tensor))
            dense[name] = _from_fp8(*halves.values())
        elif ".experts." in name:
            packed |= (halves := _mxfp4(name, tensor, generator))
            dense[name] = convert_moe_packed_tensors(*halves.values()).float()
        else:
            packed[name] = dense[name] = tensor
    settings: dict[str, Any] = {"quant_method": method}
    if method == "fp8":
        settings |= {"weight_block_size": FP8_BLOCK, "activation_scheme": "dynamic"}
    folders = folder / "quantized", folder / "dense"
    for target, tensors in zip(folders, (packed, dense), strict=True):
        shutil.copytree(source, target)
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folders


def _mxfp4(name: str, tensor: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random blocks and scales of the size of `tensor`, [E, in, out]."""
    experts, inputs, out = tensor.shape
    shape = (experts, out, inputs // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), generator=generator).byte(),
        f"{name}_scales": torch.randint(120, 125, shape, generator=generator).byte(),
    }


def _fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    rows, columns = (-(-n // b) for n, b in zip(tensor.shape, FP8_BLOCK, strict=True))
    scales = torch.linspace(0.002, 0.02, rows * columns).view(rows, columns)
    values = tensor.clone()
    for i, j in ((i, j) for i in range(rows) for j in range(columns)):
        _block(values, i, j).div_(scales[i, j])
    return {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def _from_fp8(values: Tensor, scales: Tensor) -> Tensor:
    found = values.float()
    for i in range(len(scales)):
        for j in range(scales.size(1)):
            _block(found, i, j).mul_(scales[i, j])
    return found


def _block(matrix: Tensor, i: int, j: int) -> Tensor:
    rows, columns = FP8_BLOCK
    return matrix[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
