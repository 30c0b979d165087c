"""Checkpoints as folders of safetensors that other tools read, complete or absent, free of rank counts.

A full fine-tune is a plain Hugging Face folder, a LoRA model a peft folder; beside it lie `optimizer.safetensors`, and
for a critic `value_head.safetensors`. A folder is written under another name and renamed when it is whole.
"""

import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_actors.files import fsync
from skyrl_actors.messages.model import CheckpointForm, LoraSpec
from skyrl_actors.messages.weights import TensorEntry, WeightManifest
from skyrl_actors.workers.base_model import UNEMBED, BaseModel
from skyrl_actors.workers.models import VALUE_BIAS, VALUE_WEIGHT, TrainedModel

PEFT_PREFIX = "base_model.model."
SPEC_FILE = "model_spec.json"
SAVED_BY = "saved_by"
UNEMBED_WEIGHT = f"{UNEMBED}.weight"


def save(
    model: TrainedModel, base: BaseModel, base_folder: Path, folder: Path, form: CheckpointForm, mark: str | None = None
) -> None:
    """Write the whole checkpoint, fsync it, and rename it into place (replacing what was there). `mark` says who asked."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write(model, base, base_folder, staging, form)
        if mark is not None:
            (staging / SAVED_BY).write_text(mark)
        for file in staging.iterdir():
            fsync(file)
        _replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(model: TrainedModel, base: BaseModel, base_folder: Path, folder: Path, form: CheckpointForm) -> None:
    tensors = {name: view.detach().cpu().contiguous() for name, view in model.state.split(model.state.weights).items()}
    value_head = {name: tensors.pop(name) for name in (VALUE_WEIGHT, VALUE_BIAS) if name in tensors}
    lora = model.spec.lora
    if lora is None or form == "merged":
        full = tensors if lora is None else merged(tensors, lora, base)
        save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
        _copy_model_files(base_folder, folder)
        if UNEMBED_WEIGHT in full and UNEMBED_WEIGHT not in base.own:
            _untie(folder / "config.json")
    else:
        save_file(_to_peft(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(_peft_config(lora, tensors, base_folder), indent=2))
    if value_head:
        save_file(value_head, folder / "value_head.safetensors")
    if form == "training":
        moments = {key: t.cpu().contiguous() for key, t in model.state.optimizer_tensors().items()}
        save_file(moments, folder / "optimizer.safetensors")
    (folder / SPEC_FILE).write_text(json.dumps(asdict(model.spec), indent=2))


def merged(tensors: dict[str, Tensor], lora: LoraSpec, base: BaseModel) -> dict[str, Tensor]:
    """W + (alpha / rank) · B A for every adapted layer, in the base's dtype, and the other weights as they are. A head that
    shares the embedding's weights gets its own."""
    full = {name: parameter.detach().cpu().clone() for name, parameter in base.own.items()}
    for key in [name for name in tensors if name.endswith(".lora_A")]:
        layer = key.removesuffix(".lora_A")
        weight = base.own_weight(layer).detach().cpu()
        low_rank = tensors[f"{layer}.lora_B"].double() @ tensors[key].double()
        full[f"{layer}.weight"] = (weight.double() + lora.alpha / lora.rank * low_rank).to(weight.dtype)
    return full


def _untie(config_file: Path) -> None:
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))


def load(model: TrainedModel, folder: Path, with_optimizer: bool) -> None:
    """Weights (and optimizer state) of a checkpoint into a model of the same shape; pending gradients are dropped."""
    if model.spec.lora is None:
        tensors = load_file(folder / "model.safetensors")
    else:
        tensors = _from_peft(load_file(folder / "adapter_model.safetensors"))
    if (folder / "value_head.safetensors").exists():
        tensors |= load_file(folder / "value_head.safetensors")
    model.state.load(tensors)
    model.state.drop_gradients()
    model.state.load_optimizer(load_file(folder / "optimizer.safetensors") if with_optimizer else {})


def export(model: TrainedModel, base: BaseModel, base_folder: Path, path: Path, version: str) -> WeightManifest:
    """One version of a policy's weights where an engine can map it: a peft folder, or a flat file of all tensors."""
    started = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if model.spec.lora is not None:
        save(model, base, base_folder, path, "weights")
        size = sum(file.stat().st_size for file in path.iterdir())
        return WeightManifest(version, "lora", str(path), size, write_s=time.perf_counter() - started)
    return export_flat(model.state.weights, model.state.split(model.state.weights), path, version)


def export_flat(flat: Tensor, tensors: dict[str, Tensor], path: Path, version: str) -> WeightManifest:
    """`tensors` are views of `flat`, in order: their bytes are the file's."""
    started = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    num_bytes = flat.numel() * flat.element_size()
    mapped = torch.from_file(str(staging), shared=True, size=flat.numel(), dtype=flat.dtype)
    mapped.copy_(flat)
    del mapped
    os.replace(staging, path)
    entries, offset = [], 0
    for name, tensor in tensors.items():
        entries.append(TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset))
        offset += tensor.numel() * tensor.element_size()
    return WeightManifest(version, "full", str(path), num_bytes, tuple(entries), time.perf_counter() - started)


def _to_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{PEFT_PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}


def _from_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PEFT_PREFIX).removesuffix(".weight"): tensor for name, tensor in tensors.items()}


def _peft_config(lora: LoraSpec, tensors: dict[str, Tensor], base_folder: Path) -> dict[str, object]:
    layers = sorted({name.rsplit(".", 2)[-2] for name in tensors})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_folder),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "inference_mode": True,
    }


def _copy_model_files(base_folder: Path, folder: Path) -> None:
    """Config and tokenizer files: all that makes the folder loadable, but no weights of the base."""
    for file in base_folder.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copyfile(file, folder / file.name)


def _replace(staging: Path, folder: Path) -> None:
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        os.rename(folder, old)
        os.rename(staging, folder)
        shutil.rmtree(old)
    else:
        os.rename(staging, folder)
    fsync(folder.parent)
