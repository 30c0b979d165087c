"""Checkpoints: folders of safetensors that other tools can read, for any number of ranks.

A full fine-tune is a plain Hugging Face folder, and a LoRA model is a peft folder. Optimizer state
is in `optimizer.safetensors`, and the value head of a critic in `value_head.safetensors`. Tensors
are written one by one. A folder is written under a temporary name and renamed when it is complete,
so it is either complete or absent.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import CheckpointForm, LoraSpec
from skyrl_actors.storage.files import REPLACED, fsync
from skyrl_actors.workers.adapter_terms import UNEMBED, chosen
from skyrl_actors.workers.base_files import BaseTensors, copy_model_files
from skyrl_actors.workers.frozen_weights import frozen_in, frozen_weights
from skyrl_actors.workers.gathered import Gathered
from skyrl_actors.workers.merged_weights import AddedWeights
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.network import UNEMBED_WEIGHT, VALUE_BIAS, VALUE_WEIGHT, Network
from skyrl_actors.workers.published_names import Published, Stored, cut
from skyrl_actors.workers.state import MOMENTS, Kind
from skyrl_actors.workers.tensor_files import (
    InMemory,
    Joined,
    MergedSource,
    Mixed,
    Renamed,
    Shape,
    Source,
    TensorFiles,
    TensorWriter,
    shards_of,
    whole,
    write_index,
)

SPEC_FILE = "model_spec.json"
SAVED_BY = "saved_by"
EMBED = "embed_tokens.weight"  # the last parts of its name
FILE_BYTES = 5 * 10**9  # largest weight file, as for Hugging Face
VALUE_HEAD = (VALUE_WEIGHT, VALUE_BIAS)


@dataclass(frozen=True)
class BaseFiles:
    """The folder of the base model, and the dtype of merged weights."""

    folder: Path
    dtype: str  # of weights with a merged adapter


def save(
    model: TrainedModel,
    base: BaseFiles,
    folder: Path,
    form: CheckpointForm,
    notes: Mapping[str, str] | None = None,
    writes: bool = True,
) -> None:
    """Write the complete checkpoint, fsync it, and rename it into place.

    An existing folder is replaced. `notes` are texts to write beside the weights, by file name.
    Every rank calls this; one rank writes.
    """
    gathered = Gathered(model, form)
    if not writes:
        gathered.finish()
        return
    try:
        _write_folder(model, gathered, base, folder, form, notes or {})
    except Exception:
        gathered.finish()  # otherwise the other ranks wait until their deadline
        raise


def _write_folder(
    model: TrainedModel,
    gathered: Gathered,
    base: BaseFiles,
    folder: Path,
    form: CheckpointForm,
    notes: Mapping[str, str],
) -> None:
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _write(model, gathered, base, staging, form)
        for name, text in notes.items():
            (staging / name).write_text(text)
        for file in staging.iterdir():
            fsync(file)
        replace_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(
    model: TrainedModel, gathered: Gathered, base: BaseFiles, folder: Path, form: CheckpointForm
) -> None:
    weights = gathered.of("weights")
    value_head: dict[str, Tensor] = {}
    lora = model.spec.lora
    if lora is None:
        names, frozen = model.network.stored_form, frozen_weights(model)
        shapes = {n: shape for n, shape in model.state.shapes.items() if n not in VALUE_HEAD}
        shapes |= {name: tuple(tensor.shape) for name, tensor in frozen.items()}
        tensors = chain(_without_value_head(weights, value_head), frozen.items())
        stored = (part for name, tensor in tensors for part in names.cut(name, tensor))
        _write_shards(folder, names.stored_shapes(shapes), stored, torch.float32)
        copy_model_files(base.folder, folder)
    else:
        tensors = dict(_without_value_head(weights, value_head))
        if form == "merged":
            _write_merged(model.network, tensors, lora, base, folder)
        else:
            in_file = _adapter_parts(model, lora)
            named = dict(part for n, tensor in tensors.items() for part in cut(in_file[n], tensor))
            save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder / "adapter_config.json").write_text(
                json.dumps(_peft_config(lora, named, base.folder), indent=2)
            )
    if value_head:
        save_file(value_head, folder / "value_head.safetensors")
    if form == "training":
        _write_moments(model, gathered, folder / "optimizer.safetensors")
    (folder / SPEC_FILE).write_text(json.dumps(asdict(model.spec), indent=2))


def _without_value_head(
    weights: Iterable[tuple[str, Tensor]], value_head: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights one by one, except the value head, which is put into `value_head`."""
    for name, tensor in weights:
        if name in VALUE_HEAD:
            value_head[name] = tensor.contiguous()
        else:
            yield name, tensor.contiguous()


def _write_shards(
    folder: Path,
    shapes: dict[str, Shape],
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Write the weights into one or more files. `tensors` come in the order of `shapes`."""
    shards = shards_of(shapes, dtype.itemsize, FILE_BYTES)
    count = len(shards)
    files = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    place = {name: i for i, shard in enumerate(shards) for name in shard}
    writers: dict[int, TensorWriter] = {}
    for name, tensor in tensors:
        i = place[name]
        if i not in writers:
            writers = {i: TensorWriter(folder / files[i], {n: shapes[n] for n in shards[i]}, dtype)}
        writers[i].put(name, tensor)
    if count > 1:
        num_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        write_index(folder, files, shards, num_bytes)


def _write_moments(model: TrainedModel, gathered: Gathered, path: Path) -> None:
    if not model.state.num_steps:
        save_file({}, path)
        return
    shapes = {
        f"{name}.{kind}": shape for kind in MOMENTS for name, shape in model.state.shapes.items()
    }
    writer = TensorWriter(path, {"num_steps": (1,), **shapes}, torch.float32)
    writer.put("num_steps", torch.tensor([float(model.state.num_steps)]))
    for kind in MOMENTS:
        for name, tensor in gathered.of(kind):
            writer.put(f"{name}.{kind}", tensor)


def _write_merged(
    network: Network, adapter: dict[str, Tensor], lora: LoraSpec, base: BaseFiles, folder: Path
) -> None:
    """Write the base's weights with the adapter merged in, in the base's dtype.

    An adapted layer becomes W + (alpha / rank) · B A. An adapted head that is tied to the embedding
    gets its own weights.
    """
    dtype: torch.dtype = getattr(torch, base.dtype)
    with BaseTensors(base.folder) as files:
        tied = f"{UNEMBED}.lora_A" in adapter and UNEMBED_WEIGHT not in files.shapes
        embed = next(name for name in files.shapes if name.endswith(EMBED)) if tied else ""
        shapes = {**files.shapes, **({UNEMBED_WEIGHT: files.shapes[embed]} if tied else {})}
        added = AddedWeights(network, lora, adapter, shapes)

        def merged() -> Iterator[tuple[str, Tensor]]:
            for name in shapes:
                weight = whole(files, embed if tied and name == UNEMBED_WEIGHT else name)
                own = added.of(name)
                yield name, (weight if own is None else weight.double() + own).to(dtype)

        _write_shards(folder, shapes, merged(), dtype)
    copy_model_files(base.folder, folder)
    if tied:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "tie_word_embeddings": False}, indent=2)
        )


def load(
    model: TrainedModel, folder: Path, with_optimizer: bool, mixed: tuple[Path, float] | None = None
) -> None:
    """Load weights (and optimizer state) into a model of the same shape.

    Pending gradients are dropped.

    All files are checked before anything is overwritten. `mixed` is another checkpoint and the
    share of the weights that comes from `folder`.
    """
    state = model.state
    with ExitStack() as open_files:
        moments: tuple[dict[Kind, Source], int] = ({}, 0)
        if with_optimizer:
            moments = moments_in(
                open_files.enter_context(TensorFiles(folder / "optimizer.safetensors")),
                state.shapes,
            )
        source = _in_folder(model, folder, open_files)
        state.load(
            source
            if mixed is None
            else Mixed(_in_folder(model, mixed[0], open_files), source, mixed[1])
        )
        state.drop_gradients()
        state.load_moments(*moments)


def _in_folder(model: TrainedModel, folder: Path, open_files: ExitStack) -> Source:
    """Return all weights of the model from a checkpoint, which must contain them."""
    shapes = {n: shape for n, shape in model.state.shapes.items() if n not in VALUE_HEAD}
    is_critic = VALUE_WEIGHT in model.state.shapes
    files = open_files.enter_context(_weights_of(model, folder))
    if model.spec.lora is None:
        form = model.network.stored_form
        found = Published(files, form.of_weights(shapes), shapes)
        theirs = files.shapes.keys() - found.read - frozen_in(files, model)
    else:
        found = Published(files, _adapter_parts(model, model.spec.lora), shapes)
        theirs = files.shapes.keys() - found.read
    missing = shapes.keys() - found.shapes.keys()
    _check_same(missing, theirs, is_critic)
    sources: list[Source] = [found, _kept(model, missing)]
    if is_critic:
        sources.append(_value_head(model, folder, files, open_files))
    return MergedSource(sources)


def _adapter_parts(model: TrainedModel, lora: LoraSpec) -> dict[str, tuple[Stored, ...]]:
    terms = chosen(model.network.terms, lora)
    return model.network.stored_form.of_adapter(terms, lora.rank, lora.expert_layout)


def _weights_of(model: TrainedModel, folder: Path) -> TensorFiles:
    if model.spec.lora is not None:
        return TensorFiles(folder / "adapter_model.safetensors")
    return TensorFiles(folder, "model*.safetensors")


def _check_same(missing: Set[str], unknown: Set[str], is_critic: bool) -> None:
    """Raise InvalidRequest for weights that the files lack, or that the model lacks.

    A critic ignores the heads of a policy or a reward model.
    """
    odd = {name for name in missing if not (is_critic and UNEMBED in name)}
    odd |= {
        name
        for name in unknown
        if not (is_critic and (UNEMBED in name or name.startswith("score.")))
    }
    if odd:
        raise InvalidRequest(
            f"the tensors of the checkpoint do not match the model: {sorted(odd)[:4]}"
        )


def _kept(model: TrainedModel, names: Set[str]) -> Source:
    """Return the critic's own initial tensors, for those that a policy's adapter lacks."""
    return InMemory(
        {
            name: tensor
            for name, tensor in model.state.tensors("weights")
            if name in names and tensor is not None
        }
        if names
        else {}
    )


def _value_head(
    model: TrainedModel, folder: Path, files: TensorFiles, open_files: ExitStack
) -> Source:
    """Return the value head: the critic's own, the score of a reward model, or zeros.

    Zeros are for the trunk of a policy; the values then start at zero.
    """
    head = folder / "value_head.safetensors"
    if head.exists():
        return open_files.enter_context(TensorFiles(head))
    zeros = InMemory({name: torch.zeros(model.state.shapes[name]) for name in VALUE_HEAD})
    if files.shapes.get("score.weight") != model.state.shapes[VALUE_WEIGHT]:
        return zeros
    score = {
        VALUE_WEIGHT: "score.weight",
        **({VALUE_BIAS: "score.bias"} if "score.bias" in files.shapes else {}),
    }
    return MergedSource([zeros, Renamed(files, score)])


def moments_in(files: TensorFiles, shapes: Mapping[str, Shape]) -> tuple[dict[Kind, Source], int]:
    """Return the moments and the number of steps in an optimizer file; nothing for an empty file.

    A file has one tensor for each weight and moment, or one vector for each moment.
    """
    if not files.shapes:
        return {}, 0
    if "exp_avg" in files.shapes:
        sources: dict[Kind, Source] = {kind: Joined(files, kind, shapes) for kind in MOMENTS}
        size = sum(torch.Size(shape).numel() for shape in shapes.values())
        if any(torch.Size(files.shapes[kind]).numel() != size for kind in MOMENTS):
            raise InvalidRequest("the optimizer state of the checkpoint does not match the model")
        return sources, int(whole(files, "step"))
    if odd := {f"{name}.{kind}" for name in shapes for kind in MOMENTS} - {*files.shapes}:
        raise InvalidRequest(
            f"the optimizer state of the checkpoint does not match the model: {sorted(odd)[:4]}"
        )
    named: dict[Kind, Source] = {
        kind: Renamed(files, {name: f"{name}.{kind}" for name in shapes}) for kind in MOMENTS
    }
    return named, int(whole(files, "num_steps"))


def _peft_config(lora: LoraSpec, names: Iterable[str], base_folder: Path) -> dict[str, object]:
    layers = sorted({name.rsplit(".", 3)[-3] for name in names})
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


def replace_folder(staging: Path, folder: Path) -> None:
    """Rename `staging` to `folder`, and remove the folder that was there."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}{REPLACED}")
        shutil.rmtree(old, ignore_errors=True)  # of a killed process with the same number
        os.rename(folder, old)
        os.rename(staging, folder)
        shutil.rmtree(old, ignore_errors=True)  # a sweep removes what is left
    else:
        os.rename(staging, folder)
    fsync(folder.parent)
