"""One training rank: a base model, the trained models over it, and the verbs on them. Called by an actor group."""

import shutil
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_actors.losses import REGISTRY
from skyrl_actors.losses.torch_ops import TorchOps
from skyrl_actors.messages.columns import TARGETS, Columns
from skyrl_actors.messages.errors import CollectiveFailed, InternalError
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.workers import checkpoint, snapshot
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.interface import BaseModelInfo, Part, RowOutput, WorkerSpec
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.packing import Pass, plan_passes
from skyrl_actors.workers.snapshot import StateCopy

ONE_THREAD_TOKENS = 256


class TorchWorker:
    def __init__(self, spec: WorkerSpec):
        self.spec = spec
        self.device = torch.device("cuda" if spec.device == "gpu" else "cpu")
        self.models: dict[str, TrainedModel] = {}
        self._base: BaseModel | None = None
        self._copies: dict[int, StateCopy] = {}
        self._next_copy = 0
        torch.set_num_threads(spec.num_threads)

    def rendezvous(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def setup(self, address: str, port: int) -> BaseModelInfo:
        if self.spec.world_size > 1:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"tcp://{address}:{port}",
                rank=self.spec.rank,
                world_size=self.spec.world_size,
                timeout=timedelta(seconds=self.spec.collective_timeout_s),
            )
        self._base = BaseModel(self.spec.base_folder, getattr(torch, self.spec.dtype), self.device)
        size = sum(p.numel() for p in self._base.own.values())
        return BaseModelInfo(size, self._base.vocab_size, self._base.max_context_tokens)

    @property
    def base(self) -> BaseModel:
        if self._base is None:
            raise InternalError("the worker was not set up")
        return self._base

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self.models:
            raise InternalError(f"rank {self.spec.rank} does not hold model {model_id}")
        return self.models[model_id]

    def create_model(self, spec: ModelSpec) -> int:
        self.base.release()
        self.models[spec.model_id] = TrainedModel(spec, self.base)
        return self.models[spec.model_id].state.num_parameters

    def delete_model(self, model_id: str) -> None:
        self.base.release()
        self._forget_copies(model_id)
        self.models.pop(model_id, None)

    def forward_backward(
        self, rows: tuple[int, ...], model_id: str, columns: Columns, loss: LossCall | None, forward_only: bool
    ) -> RowOutput:
        """Adds the gradient of the summed loss over `rows` to the model's pending gradients, unless `forward_only`.

        `loss` None (a critic's plain forward) gives predictions and no loss.
        """
        started = time.perf_counter()
        model = self._model(model_id)
        model.bind(self.base)
        if not forward_only:
            model.state.ensure_gradients()
        flat = RaggedBuffer(columns, rows)
        sums: dict[str, float] = {}
        with torch.set_grad_enabled(not forward_only):
            for plan in plan_passes(rows, columns.lengths, self.spec.microbatch_tokens):
                self._use_threads(plan.num_tokens)
                where = columns.positions(plan.rows)
                predicted, elementwise = self._run_pass(model, columns, plan, where, loss, forward_only, sums)
                flat.put(where, predicted, elementwise)
        field = "values" if model.spec.role == "critic" else "logprobs"
        return RowOutput(rows, field, *flat.in_row_order(), sums, time.perf_counter() - started)

    def _run_pass(
        self, model: TrainedModel, columns: Columns, plan: Pass, where: np.ndarray,
        loss: LossCall | None, forward_only: bool, sums: dict[str, float],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        targets = columns.fields.get(TARGETS)
        predicted = model.predict(
            self.base, self._ints(columns.tokens[where]), None if targets is None else self._ints(targets[where]), plan
        )
        if loss is None:
            return predicted, None
        entry = REGISTRY[loss.name]
        inputs = {name: torch.full_like(predicted, default, requires_grad=False) for name, default in entry.optional.items()}
        for name, array in columns.fields.items():
            if name != TARGETS:
                inputs[name] = torch.from_numpy(array[where]).to(self.device)
        terms = entry.function(TorchOps(columns.lengths[list(plan.rows)].tolist()), predicted, inputs, **loss.config)
        total = terms.elementwise.sum()
        if not forward_only:
            total.backward()
        for name, value in {"loss:sum": total.detach(), **terms.sums}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        return predicted, terms.elementwise

    def _use_threads(self, num_tokens: int) -> None:
        """Small operations are faster on one thread than waiting for a second one to wake."""
        if self.device.type == "cpu":
            torch.set_num_threads(1 if num_tokens < ONE_THREAD_TOKENS else self.spec.num_threads)

    def _ints(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def drop_gradients(self, model_id: str) -> None:
        self._model(model_id).state.drop_gradients()

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        state = self._model(model_id).state
        gradients = state.ensure_gradients()
        if self.spec.world_size > 1:
            try:
                dist.all_reduce(gradients)
            except RuntimeError as error:  # its deadline, or a peer that is gone: this process group is of no use any more
                raise CollectiveFailed(f"rank {self.spec.rank}: {error}") from None
        norm = state.step(adam)
        return {"skyrl.ai/grad_norm": norm, "skyrl.ai/learning_rate": adam.learning_rate}

    def save_checkpoint(self, model_id: str, folder: str, form: CheckpointForm, mark: str) -> None:
        if self.spec.rank == 0:
            base_folder = Path(self.spec.base_folder)
            checkpoint.save(self._model(model_id), self.base, base_folder, Path(folder), form, mark)

    def load_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        checkpoint.load(self._model(model_id), Path(folder), with_optimizer)

    def export_weights(self, model_id: str, path: str, version: str) -> WeightManifest | None:
        if self.spec.rank != 0:
            return None
        return checkpoint.export(self._model(model_id), self.base, Path(self.spec.base_folder), Path(path), version)

    def copy_state(self, model_id: str) -> int:
        self._forget_copies(model_id)  # one that was never written, because its controller died
        self._next_copy += 1
        self._copies[self._next_copy] = StateCopy.of(self._model(model_id))
        return self._next_copy

    def _forget_copies(self, model_id: str) -> None:
        for handle, copy in list(self._copies.items()):  # another thread may take one out meanwhile
            if copy.spec.model_id == model_id:
                self._copies.pop(handle, None)

    def write_state(self, handle: int, folder: str) -> None:
        """Called on another thread than the verbs: training goes on."""
        self._copies.pop(handle).write(Path(folder), self.spec.rank, self.spec.world_size)

    def restore_state(self, spec: ModelSpec, folder: str) -> int:
        self.base.release()
        model = TrainedModel(spec, self.base)
        snapshot.load(model.state, Path(folder), self.spec.rank, self.spec.world_size)
        self.models[spec.model_id] = model
        return model.state.num_parameters

    def renumber(self, model_id: str, keep_optimizer: bool) -> None:
        state = self._model(model_id).state
        state.drop_gradients()
        if not keep_optimizer:
            state.load_optimizer({})

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def discard_export(self, path: str) -> None:
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)

    def move(self, parts: tuple[Part, ...], to: Literal["device", "host"]) -> None:
        """On a GPU, move parts of all models (and the base with "weights") between device and host memory."""
        if self.device.type == "cpu":
            return
        target = self.device if to == "device" else torch.device("cpu")
        if "weights" in parts:
            self.base.move(target)
        for model in self.models.values():
            for part in parts:
                model.state.move(part, target)
        if to == "host":
            torch.cuda.empty_cache()

    def read_files(self, path: str) -> dict[str, bytes]:
        source = Path(path)
        return {"": source.read_bytes()} if source.is_file() else {f.name: f.read_bytes() for f in source.iterdir()}


def load_and_forget(base_folder: str) -> None:
    """So that every module is imported which loading a base model imports."""
    BaseModel(base_folder, torch.float32, torch.device("cpu"))


class RaggedBuffer:
    """Collects per-token results of passes, which come in another order, at the flat positions of `rows`."""

    def __init__(self, columns: Columns, rows: tuple[int, ...]):
        self._positions = columns.positions(rows)
        self._predicted = np.zeros(columns.shape, np.float32)
        self._elementwise = np.zeros(columns.shape, np.float32)

    def put(self, where: np.ndarray, predicted: Tensor, elementwise: Tensor | None) -> None:
        self._predicted[where] = predicted.detach().float().cpu().numpy()
        if elementwise is not None:
            self._elementwise[where] = elementwise.detach().float().cpu().numpy()

    def in_row_order(self) -> tuple[np.ndarray, np.ndarray]:
        return self._predicted[self._positions], self._elementwise[self._positions]
