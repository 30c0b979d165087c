"""One training rank: a base model, the models trained over it, and the verbs on them."""

import gc
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest
from skyrl_actors.messages.model import AdamParams, CheckpointForm, ModelSpec
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.storage.private_folders import make_folder
from skyrl_actors.transport import streams
from skyrl_actors.workers import checkpoint, export, snapshot
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.gather_queue import GatherQueue
from skyrl_actors.workers.interface import (
    BaseModelInfo,
    MemoryPart,
    PartCall,
    Refused,
    RowOutput,
    WorkerSpec,
)
from skyrl_actors.workers.model_factory import ModelFactory, collective, info_of
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.packing import plan_passes
from skyrl_actors.workers.paging import AdapterPager
from skyrl_actors.workers.passes import PassPart as Rows
from skyrl_actors.workers.passes import PassRunner, empty_pass, num_passes_of_all
from skyrl_actors.workers.snapshot import StateCopy

T = TypeVar("T")
# Elements of hidden states: 256 tokens of the tiny model, 96 of a model of width 512.
ONE_THREAD_ELEMENTS = 50_000


class TorchWorker:
    """Implement the verbs of `TrainWorker` on one rank. Actor groups call it."""

    def __init__(self, spec: WorkerSpec):
        self.spec = spec
        self.device = torch.device("cuda" if spec.device == "gpu" else "cpu")
        self.models: dict[str, TrainedModel] = {}
        self._pager = AdapterPager(spec.max_adapters, self.device)
        self._model_factory: ModelFactory | None = None
        self._copies: dict[int, StateCopy] = {}
        self._next_copy = 0
        torch.set_num_threads(spec.num_threads)

    def rendezvous(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def setup(self, address: str, port: int) -> BaseModelInfo:
        self._address = address
        replicas = self.spec.strategy.type == self.spec.full_strategy.type == "replica"
        if (self.spec.world_size > 1 or not replicas) and not dist.is_initialized():
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"tcp://{address}:{port}",
                rank=self.spec.rank,
                world_size=self.spec.world_size,
                timeout=timedelta(seconds=self.spec.collective_timeout_s),
            )
        self._model_factory = ModelFactory(self.spec, self.device)
        if self.spec.preload:
            _ = self._model_factory.base
        return info_of(self.spec.base_folder)

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
            self._pager.make_room()
        try:
            model = self.models[spec.model_id] = self.model_factory.make(spec)
        except ConfigError as error:
            # Raised for the model's own network, or for a base that loads with the first model.
            raise InvalidRequest(str(error)) from error
        if model.shares_network and isinstance(model.state, FlatState):
            self._pager.add(spec.model_id, model.state)
        return model.state.num_parameters

    def delete_model(self, model_id: str) -> None:
        self.model_factory.release()
        self._forget_copies(model_id)
        self._free(model_id)

    def _free(self, model_id: str) -> None:
        model = self.models.pop(model_id, None)
        if model is None:
            return
        self._pager.forget(model_id)
        model.state.close()
        if not model.shares_network and not isinstance(model.state, FlatState):
            del model
            gc.collect()  # the hooks and modules of a network form reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def forward_backward(
        self, calls: tuple[PartCall, ...], forward_only: bool
    ) -> list[RowOutput | Refused]:
        started = time.perf_counter()
        parts = [
            Rows(
                model=self._model(call.model_id),
                columns=call.columns,
                rows=call.rows,
                loss=call.loss,
            )
            for call in calls
        ]
        together = [part for part in parts if part.model.shares_network]
        refused: dict[int, Refused] = {}
        for batch in self._fitting(together) + [
            [part] for part in parts if not part.model.shares_network
        ]:
            refused |= self._run(batch, forward_only)
        seconds = time.perf_counter() - started
        return [refused.get(id(part)) or self._output(part, seconds) for part in parts]

    def _fitting(self, parts: list[Rows]) -> list[list[Rows]]:
        """Split the parts into batches whose adapters fit on the device at once."""
        size = self.spec.max_adapters
        return [parts[start : start + size] for start in range(0, len(parts), size)]

    def _use(self, models: Sequence[TrainedModel]) -> None:
        """Bring the adapters among these models to the device, before their weights are used."""
        states = {model.spec.model_id: model.state for model in models if model.shares_network}
        self._pager.use(
            {model_id: state for model_id, state in states.items() if isinstance(state, FlatState)}
        )

    def _output(self, part: Rows, seconds: float) -> RowOutput:
        field = "values" if part.model.spec.role == "critic" else "logprobs"
        # The ranks of a sequence group have the same results; the first one reports them.
        reports = self.spec.rank % self.spec.sequence_parallel == 0
        if not reports:
            part = Rows(model=part.model, columns=part.columns, rows=(), loss=part.loss)
        values, elementwise = part.in_row_order()
        return RowOutput(
            rows=part.rows,
            field=field,
            values=values,
            elementwise=elementwise,
            sums=part.sums,
            compute_s=seconds,
        )

    def _run(self, parts: list[Rows], forward_only: bool) -> dict[int, Refused]:
        """Run parts that share passes.

        When memory runs out, run them again with half the budget, if all added gradients can be
        undone.
        """
        self._use([part.model for part in parts])
        self.model_factory.bind(parts[0].model)
        # Other ranks can have added the rows that this rank refuses. Then the model is rebuilt on
        # all.
        clean = {
            id(part): forward_only or (self.spec.world_size == 1 and _can_put_back(part.model))
            for part in parts
        }
        # Otherwise other ranks wait in this pass.
        alone = not self.model_factory.in_step(parts[0].model) and self.spec.sequence_parallel == 1
        saved = {id(part): None if forward_only else _saved(part.model) for part in parts}
        budget, error = self.spec.microbatch_tokens, ""

        def put_back(some: list[Rows]) -> None:
            for part in some:
                if not forward_only and clean[id(part)] and isinstance(part.model.state, FlatState):
                    part.model.state.put_back(saved[id(part)])

        for _ in range(2):
            try:
                if alone:
                    self._run_passes(parts, budget, forward_only)
                else:
                    collective(
                        self.spec,
                        lambda: self._run_passes(parts, self.spec.microbatch_tokens, forward_only),
                    )
                break
            except torch.OutOfMemoryError as full:
                if not alone or not all(clean.values()):
                    raise
                error = str(full).splitlines()[0]
            put_back(parts)
            for part in parts:
                part.clear()
            budget = max(
                1, min(budget, sum(int(p.columns.lengths[list(p.rows)].sum()) for p in parts)) // 2
            )
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            return {id(part): Refused(_too_large(budget, error), clean=True) for part in parts}
        odd = [part for part in parts if part.refused]
        put_back(odd)
        return {
            id(part): Refused(InvalidRequest(part.refused or ""), clean[id(part)]) for part in odd
        }

    def _run_passes(self, parts: list[Rows], budget: int, forward_only: bool) -> None:
        network = parts[0].model.network
        runner = PassRunner(network, self.device, forward_only)
        plans = plan_passes([(part.rows, part.columns.lengths) for part in parts], budget)
        multiple = self.spec.sequence_parallel
        plans = [plan.padded_to(multiple) for plan in plans]
        if self.model_factory.in_step(parts[0].model):
            missing = num_passes_of_all(len(plans), self.device) - len(plans)
            plans += [empty_pass(multiple)] * missing
        for plan in plans:
            self._use_threads(plan.num_tokens * network.hidden_size)
            runner.run(parts, plan)
        for part in parts if not forward_only else ():
            # Also on a rank without rows of the model, because other ranks wait for it in the next
            # step.
            part.model.state.pending = True

    def _use_threads(self, num_elements: int) -> None:
        """Use one thread for small operations, which is faster than waking a second thread."""
        if self.device.type == "cpu":
            torch.set_num_threads(
                1 if num_elements < ONE_THREAD_ELEMENTS else self.spec.num_threads
            )

    def drop_gradients(self, model_id: str) -> None:
        self._model(model_id).state.drop_gradients()

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        model = self._model(model_id)
        model.versions.end(self._patience_s)
        self._use([model])
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
        self._use([self._model(model_id)])
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
        shards: bool = False,
    ) -> WeightManifest | None:
        model, writes = self._model(model_id), self.model_factory.writes
        lives = (
            materialize == "lazy"
            and model.spec.lora is None
            and (shards or isinstance(model.state, FlatState))
        )
        if lives:
            dtype = getattr(torch, self.spec.export_dtype)
            made = export.described(model.state.shapes, Path(path), version, dtype)
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

    def copy_state(self, model_id: str) -> int:
        self._forget_copies(model_id)  # an unwritten copy of a dead controller
        self._next_copy += 1
        self._copies[self._next_copy] = self._gathering(model_id, StateCopy.of)
        return self._next_copy

    def _gathering(self, model_id: str, work: Callable[[TrainedModel], T]) -> T:
        """Run work in which ranks meet to read or write sharded weights."""
        model = self._model(model_id)
        return (
            work(model)
            if isinstance(model.state, FlatState)
            else collective(self.spec, lambda: work(model))
        )

    def _forget_copies(self, model_id: str) -> None:
        for handle, copy in list(self._copies.items()):  # another thread can remove one
            if copy.spec.model_id == model_id:
                self._copies.pop(handle, None)

    def write_state(self, handle: int, folder: str) -> None:
        """Write a copy. A separate thread calls this while training continues."""
        self._copies.pop(handle).write(Path(folder), self.spec.rank, self.spec.world_size)

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
        """Send a version from the live weights or from its file.

        The live weights are used if they still equal the version, and it is unwritten or an engine
        shares their device. The file can be read while training continues.
        """
        asked, version = replace(stream, host=self._address), manifest.version
        model = next((m for m in self.models.values() if version in m.versions.paths), None)
        state = model.state if model else None
        if (
            model
            and isinstance(state, FlatState)
            and (stream.backend == "ipc" or version not in model.versions.written)
        ):
            take = streams.from_live(manifest.tensors, state.weights)
            found, sender = streams.open_stream(manifest, asked, self.device, take)
            model.versions.read_by(sender)
        elif model and version not in model.versions.written:
            queue = GatherQueue(
                manifest, stream.bucket_bytes, min(stream.timeout_s, self._patience_s)
            )
            found, _ = streams.open_stream(manifest, asked, self.device, queue.take, queue.close)
            model.versions.feeds[stream.id] = queue
        else:
            found, _ = streams.open_stream(
                manifest, asked, self.device, streams.from_file(manifest)
            )
        return found

    def feed(self, version: str, stream_id: str) -> None:
        model = next((m for m in self.models.values() if version in m.versions.paths), None)
        if model is None or version in model.versions.written or isinstance(model.state, FlatState):
            return  # that stream needs no gathering
        queue = model.versions.feeds.pop(stream_id, None)
        dtype = getattr(torch, self.spec.export_dtype)

        def gather(model: TrainedModel) -> None:
            for _, tensor in model.state.tensors("weights"):
                if queue is not None and tensor is not None:
                    queue.put(tensor.detach().to(dtype))

        self._gathering(model.spec.model_id, gather)

    def write_probe(self, path: str, content: str) -> None:
        make_folder(Path(path).parent)
        Path(path).write_text(content)

    def discard_export(self, path: str) -> None:
        for model in self.models.values():
            model.versions.drop(path)
        if not self.model_factory.writes:
            return
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)

    def move(self, parts: tuple[MemoryPart, ...], to: Literal["device", "host"]) -> int:
        """Move parts of all models between GPU and host memory, and return the bytes moved.

        With "weights", the base moves too. Idle adapters stay in host memory.
        """
        self._pager.phase_moved(parts, to)
        if self.device.type == "cpu":
            return 0
        before = torch.cuda.memory_allocated()
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
        torch.cuda.synchronize()
        moved = abs(torch.cuda.memory_allocated() - before)
        if to == "host":
            torch.cuda.empty_cache()
        return moved

    def read_files(self, path: str) -> dict[str, bytes]:
        source = Path(path)
        return (
            {"": source.read_bytes()}
            if source.is_file()
            else {f.name: f.read_bytes() for f in source.iterdir()}
        )


def _can_put_back(model: TrainedModel) -> bool:
    """Return whether gradients added by a call can be undone.

    Gradients of adapters are small and are saved before each call. Gradients of a whole model are
    not saved, but they are known to be zero when none are pending.
    """
    return isinstance(model.state, FlatState) and (model.shares_network or not model.state.pending)


def _saved(model: TrainedModel) -> torch.Tensor | None:
    return (
        model.state.saved_gradients()
        if model.shares_network and isinstance(model.state, FlatState)
        else None
    )


def _too_large(budget: int, error: str) -> InvalidRequest:
    return InvalidRequest(
        f"out of memory in a pass of {2 * budget} tokens, and in one of {budget}: {error}. "
        "Send shorter rows, or set a lower microbatch_tokens, activations=recompute or "
        "sequence_parallel"
    )


def load_and_forget(base_folder: str) -> None:
    """Load and drop a base model, so that all modules for loading are imported."""
    BaseModel(base_folder, torch.float32, torch.device("cpu"))
