"""A backend in memory for tests of the controller. It records calls, and can block or fail them."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_actors.backends.backend import (
    AdapterMemory,
    BackendCopy,
    Capabilities,
    Mixture,
    ServedModels,
)
from skyrl_actors.controller.checkpoints import SAVED_BY, SPEC_FILE
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, PartialSample, SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest


def changed(bases: ServedModels, **changes: Any) -> ServedModels:
    """Return the base models with other capabilities of the first."""
    return ServedModels((replace(bases.default, **changes), *bases.bases[1:]))


class FakeBackend:
    """A backend that computes nothing.

    Calls wait for the event `go`; verbs in `failing` raise InternalError.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.models: dict[str, ModelSpec] = {}
        self.numbers: dict[str, int] = {}
        self.on_lost: Callable[[str, str], None] = lambda base_model, role: None
        self.lost: str | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.failing: set[str] = set()
        self.left: list[SamplerWeights] = []  # versions that were dropped, and are not freed
        self.adapters = AdapterMemory()

    async def _call(self, verb: str, model_id: str) -> None:
        await self.go.wait()
        await asyncio.sleep(0)
        if verb in self.failing:
            raise InternalError(f"{verb} broke")
        self.calls.append((verb, model_id))

    async def stand_by(self) -> None: ...

    async def start(self, epoch: int) -> ServedModels:
        able = Capabilities(
            base_model="tiny",
            base_folder="/models/tiny",
            vocab_size=320,
            max_context_tokens=512,
            max_sample_tokens=512,
            roles=("policy", "critic"),
            adapters=self.adapters,
        )
        return ServedModels((able,))

    async def ready(self, spec: ModelSpec) -> None:
        pass

    def holding(self, base_model: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def residents(self) -> dict[str, int]:
        return dict(self.numbers)

    async def create_model(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        await self._call("create_model", spec.model_id)
        self.models[spec.model_id] = spec
        self.numbers[spec.model_id] = precondition.number or 0

    async def delete_model(self, spec: ModelSpec) -> None:
        await self._call("delete_model", spec.model_id)
        self.models.pop(spec.model_id, None)
        self.numbers.pop(spec.model_id, None)

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        if "forward_backward" in self.failing:
            raise InternalError("forward_backward broke")
        await self._call(f"forward_backward {int(columns.tokens[0])}", spec.model_id)
        return LossOutput(
            offsets=columns.offsets,
            fields={"logprobs": np.zeros(columns.num_tokens, np.float32)},
            metrics={"loss:sum": 0.0},
        )

    async def drop_gradients(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        await self._call("drop_gradients", spec.model_id)

    async def optim_step(
        self, spec: ModelSpec, precondition: OpPrecondition, adam: AdamParams
    ) -> dict[str, float]:
        await self._call("optim_step", spec.model_id)
        return {}

    async def save_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        form: CheckpointForm,
        mark: str,
    ) -> None:
        await self._call("save_checkpoint", spec.model_id)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / SPEC_FILE).write_text(json.dumps(asdict(spec)))
        (Path(folder) / SAVED_BY).write_text(mark)
        (Path(folder) / "weights.bin").write_text("weights")

    async def load_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        with_optimizer: bool,
        mix: Mixture = None,
    ) -> None:
        await self._call("load_checkpoint", spec.model_id)

    async def copy_state(self, spec: ModelSpec, precondition: OpPrecondition) -> BackendCopy:
        await self._call("copy_state", spec.model_id)
        return BackendCopy(handle=1, seconds=0.0)

    async def write_state(self, spec: ModelSpec, copy: BackendCopy, folder: str) -> None:
        (Path(folder) / "state").write_text(spec.model_id)

    async def restore(self, spec: ModelSpec, precondition: OpPrecondition, folder: str) -> None:
        self.calls.append(("restore", spec.model_id))

    async def renumber(
        self, spec: ModelSpec, precondition: OpPrecondition, keep_optimizer: bool
    ) -> None:
        self.calls.append(("renumber", spec.model_id))

    async def save_for_sampler(
        self, spec: ModelSpec, precondition: OpPrecondition, version: str, written: bool = False
    ) -> SamplerWeights:
        await self._call(f"save_for_sampler {version}", spec.model_id)
        return SamplerWeights(
            version=version,
            parts=(
                WeightManifest(
                    version=version, kind="lora", path=f"/dev/shm/{version}", num_bytes=1
                ),
            ),
        )

    async def has_sampler(self, weights: SamplerWeights) -> bool:
        return True

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        return SamplerWeights(version=version)

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        self.calls.append(("drop_sampler", weights.version))

    def runs(self, base_model: str) -> bool:
        return True

    def unfreed(self) -> list[SamplerWeights]:
        return self.left

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        await self._call("sample", weights.version)
        one = Sequence(
            tokens=np.asarray([1], np.int32),
            logprobs=np.asarray([-1.0], np.float32),
            stop_reason="length",
        )
        return SampleOutput(sequences=(one,) * params.num_samples, version=weights.version)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        await asyncio.sleep(timeout_s)
        return PartialSample()

    def end_stream(self, request_id: str) -> None:
        pass

    def fault(self) -> str | None:
        return None

    def waiting(self, base_model: str, request_id: str = "") -> str | None:
        return None

    async def status(self) -> dict[str, Any]:
        return {}

    async def detach(self) -> None:
        pass

    async def close(self) -> None:
        self.calls.append(("close", ""))
