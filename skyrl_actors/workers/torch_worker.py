"""One training rank: a base model, the models trained over it, and the verbs on them."""

import gc
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest
from skyrl_actors.messages.model import AdamParams, CheckpointForm, ModelSpec
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.storage.files import remove
from skyrl_actors.storage.private_folders import make_folder
from skyrl_actors.transport.device_memory import allocated, free_unused, settled
from skyrl_actors.workers import checkpoint, export, head, snapshot, varlen, version_streams
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.batches import BatchRunner
from skyrl_actors.workers.interface import (
    BaseModelInfo,
    CopiedState,
    MemoryPart,
    PartCall,
    Refused,
    RowOutput,
    WorkerSpec,
)
from skyrl_actors.workers.model_factory import ModelFactory, collective, info_of
from skyrl_actors.workers.models import TrainedModel, adapters_of
from skyrl_actors.workers.paging import AdapterPager
from skyrl_actors.workers.pass_part import PassPart
from skyrl_actors.workers.snapshot import UnwrittenCopies, copy_of
from skyrl_actors.workers.state import is_whole

T = TypeVar("T")
DEVICE_TYPES = {"gpu": "cuda", "cpu": "cpu"}  # torch's device type by that of the config


class TorchWorker:
    """Implement the verbs of `TrainWorker` on one rank. Actor groups call it."""

    def __init__(self, spec: WorkerSpec):
        self.spec = spec
        self.device = torch.device(DEVICE_TYPES[spec.device])
        self.models: dict[str, TrainedModel] = {}
        self._pager = AdapterPager(spec.adapter_room, self.device)
        self._model_factory: ModelFactory | None = None
        self._copies = UnwrittenCopies()
        torch.set_num_threads(spec.num_threads)

    def paths(self) -> dict[str, str]:
        """Return what this rank computes with. Other threads may call it at any time."""
        optimizers = {type(model.state).__name__ for model in list(self.models.values())}
        inner = {
            type(optimizer).__name__
            for model in list(self.models.values())
            if (optimizer := getattr(model.state, "optimizer", None)) is not None
        }
        return {
            "attention": varlen.path(),
            "head": head.path(self.device),
            "optimizers": ", ".join(sorted(inner or optimizers)) or "none yet",
        }

    def rendezvous(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def setup(self, address: str, port: int) -> BaseModelInfo:
        self._address = address
        whole = {self.spec.strategy.type, self.spec.full_strategy.type} <= {"replica", "jax"}
        if (self.spec.world_size > 1 or not whole) and not dist.is_initialized():
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"tcp://{address}:{port}",
                rank=self.spec.rank,
                world_size=self.spec.world_size,
                timeout=timedelta(seconds=self.spec.collective_timeout_s),
            )
        self._model_factory = self._new_factory()
        if self.spec.preload:
            _ = self._model_factory.base
        return info_of(self.spec.base_folder)

    def _new_factory(self) -> ModelFactory:
        return ModelFactory(self.spec, self.device)

    @property
    def model_factory(self) -> ModelFactory:
        if self._model_factory is None:
            raise InternalError("the worker was not set up")
        return self._model_factory

    @property
    def _patience_s(self) -> float:
        """The longest wait of this rank, as its peers can wait for it in a collective."""
        return self.spec.collective_timeout_s / 2

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self.models:
            raise InternalError(f"rank {self.spec.rank} does not hold model {model_id}")
        return self.models[model_id]

    def create_model(self, spec: ModelSpec) -> int:
        self.model_factory.release()
        self._free(spec.model_id)  # an earlier instance of the same model
        if spec.lora is not None:
            self._pager.make_room(spec.lora.rank)
        try:
            model = self.models[spec.model_id] = self.model_factory.make(spec)
        except ConfigError as error:
            # Raised for the model's own network, or for a base that loads with the first model.
            raise InvalidRequest(str(error)) from error
        for name, adapter in adapters_of([model]).items():
            self._pager.add(name, adapter)
        return model.state.num_parameters

    def delete_model(self, model_id: str) -> None:
        self.model_factory.release()
        self._copies.forget(model_id)
        self._free(model_id)

    def _free(self, model_id: str) -> None:
        model = self.models.pop(model_id, None)
        if model is None:
            return
        self._pager.forget(model_id)
        model.state.close()
        if not model.shares_network and not is_whole(model.state):
            del model
            gc.collect()  # the hooks and modules of a network form reference cycles
            free_unused(self.device)

    def forward_backward(
        self, calls: tuple[PartCall, ...], forward_only: bool
    ) -> list[RowOutput | Refused]:
        parts = [
            PassPart(
                model=self._model(call.model_id),
                columns=call.columns,
                rows=call.rows,
                loss=call.loss,
            )
            for call in calls
        ]
        runner = BatchRunner(self.spec, self.device, self.model_factory, self._pager)
        return runner.run(parts, forward_only)

    def drop_gradients(self, model_id: str) -> None:
        self._model(model_id).state.drop_gradients()

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        model = self._model(model_id)
        model.versions.end(self._patience_s)
        self._pager.use(adapters_of([model]))
        norm = collective(self.spec, lambda: model.state.step(adam))
        return {"skyrl.ai/grad_norm": norm, "skyrl.ai/learning_rate": adam.learning_rate}

    def save_checkpoint(
        self,
        model_id: str,
        folder: str,
        form: CheckpointForm,
        mark: str,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        notes = {**(notes or {}), checkpoint.SAVED_BY: mark}
        base = checkpoint.BaseFiles(Path(self.spec.base_folder), self.spec.dtype)
        writes = self.model_factory.writes
        self._gathering(
            model_id, lambda model: checkpoint.save(model, base, Path(folder), form, notes, writes)
        )

    def load_checkpoint(
        self,
        model_id: str,
        folder: str,
        with_optimizer: bool,
        mixed: tuple[str, float] | None = None,
    ) -> None:
        self._model(model_id).versions.end(self._patience_s)
        self._pager.use(adapters_of([self._model(model_id)]))
        other = None if mixed is None else (Path(mixed[0]), mixed[1])
        self._gathering(
            model_id, lambda model: checkpoint.load(model, Path(folder), with_optimizer, other)
        )

    def export_weights(
        self,
        model_id: str,
        path: str,
        version: str,
        checksums: bool,
        materialize: Materialize = "eager",
    ) -> WeightManifest | None:
        model, writes = self._model(model_id), self.model_factory.writes
        lives = materialize == "lazy" and model.spec.lora is None
        if lives:
            dtype = getattr(torch, self.spec.export_dtype)
            shapes = model.network.stored_form.stored_shapes(model.state.shapes)
            made = export.described(shapes, Path(path), version, dtype)
        else:
            made = self._written(model_id, path, version, checksums)
        model.versions.note(version, path, written=not lives)
        return made if writes else None

    def _written(
        self, model_id: str, path: str, version: str, checksums: bool
    ) -> WeightManifest | None:
        base = checkpoint.BaseFiles(Path(self.spec.base_folder), self.spec.dtype)
        writes, dtype = self.model_factory.writes, getattr(torch, self.spec.export_dtype)
        return self._gathering(
            model_id,
            lambda m: export.export(m, base, Path(path), version, writes, checksums, dtype),
        )

    def write_versions(self, model_id: str, needless: Collection[str]) -> list[str]:
        model = self.models.get(model_id)
        wanted = model.versions.unwritten(needless) if model else []
        for version in wanted:
            assert model is not None
            self._written(model_id, model.versions.paths[version], version, checksums=False)
            model.versions.written.add(version)
        return wanted

    def copy_state(self, model_id: str) -> CopiedState:
        began = time.monotonic()
        self._copies.forget(model_id)  # an unwritten copy of a dead controller
        handle = self._copies.add(copy_of(self._model(model_id)))
        return CopiedState(handle, time.monotonic() - began)

    def _gathering(self, model_id: str, work: Callable[[TrainedModel], T]) -> T:
        """Run work in which ranks meet to read or write sharded weights."""
        model = self._model(model_id)
        return work(model) if is_whole(model.state) else collective(self.spec, lambda: work(model))

    def write_state(self, handle: int, folder: str) -> None:
        """Write a copy. A separate thread calls this while training continues."""
        self._copies.take(handle).write(Path(folder), self.spec.rank, self.spec.world_size)

    def restore_state(self, spec: ModelSpec, folder: str) -> int:
        self.create_model(spec)
        model = self.models[spec.model_id]
        snapshot.load(model.state, Path(folder), self.spec.rank, self.spec.world_size)
        return model.state.num_parameters

    def renumber(self, model_id: str, keep_optimizer: bool) -> None:
        state = self._model(model_id).state
        state.drop_gradients()
        if not keep_optimizer:
            state.load_moments({}, 0)

    def exists(self, path: str) -> bool:
        return Path(path).exists() or any(
            model.versions.lives_only_as(path) for model in self.models.values()
        )

    def open_stream(self, manifest: WeightManifest, stream: WeightStream) -> WeightStream:
        return version_streams.opened(
            self._model_of(manifest.version),
            manifest,
            replace(stream, host=self._address),
            self.device,
            self._patience_s,
        )

    def feed(self, version: str, stream_ids: tuple[str, ...], everywhere: bool = False) -> None:
        model = self._model_of(version)
        if model is None or version in model.versions.written or is_whole(model.state):
            return  # that stream needs no gathering
        dtype = getattr(torch, self.spec.export_dtype)
        collective(self.spec, lambda: version_streams.gather(model, stream_ids, everywhere, dtype))

    def _model_of(self, version: str) -> TrainedModel | None:
        """Return the model whose live weights still equal this version."""
        return next((m for m in self.models.values() if version in m.versions.paths), None)

    def write_probe(self, path: str, content: str) -> None:
        make_folder(Path(path).parent)
        Path(path).write_text(content)

    def discard_export(self, path: str) -> None:
        for model in self.models.values():
            model.versions.drop(path)
        if self.model_factory.writes:
            remove(Path(path))

    def move(self, parts: tuple[MemoryPart, ...], to: Literal["device", "host"]) -> int:
        """Move parts of all models between GPU and host memory, and return the bytes moved.

        With "weights", the base moves too. Idle adapters stay in host memory.
        """
        self._pager.phase_moved(parts, to)
        if self.device.type == "cpu":
            return 0
        before = allocated(self.device)
        target = self.device if to == "device" else torch.device("cpu")
        if "weights" in parts:
            self.model_factory.move_base(target)
        for model in self.models.values():
            if "weights" in parts and isinstance(model.network, BaseModel):
                model.network.move(target)
            if (
                to == "device"
                and model.shares_network
                and not self._pager.is_on_device(model.spec.model_id)
            ):
                continue
            for part in parts:
                model.state.move(part, target)
        settled(self.device)
        moved = abs(allocated(self.device) - before)
        if to == "host":
            free_unused(self.device)
        return moved

    def read_files(self, path: str) -> dict[str, NDArray[np.uint8]]:
        return export.mapped_files(Path(path))


def load_and_forget(base_folder: str) -> None:
    """Load and drop a base model, so that all modules for loading are imported."""
    BaseModel(base_folder, torch.float32, torch.device("cpu"))
