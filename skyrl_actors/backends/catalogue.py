"""The backend of a service with several base models, which alternate on the same devices.

A call waits until its base model is on the devices, and holds it there while it runs.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from skyrl_actors.backends.backend import BackendCopy, Mixture, ServedModels
from skyrl_actors.backends.loaded_bases import LoadedBases
from skyrl_actors.backends.parkable import BaseModelFactory, ParkableBackend
from skyrl_actors.colocation.residency import Place
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, PartialSample, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights


class CatalogueBackend:
    """Route each call to the backend of its base model.

    `attempts`: failures in a row after which requests get the error of a base model that cannot be
    loaded.
    """

    def __init__(self, factory: BaseModelFactory, report: Callable[[str], None], attempts: int):
        self.on_lost: Callable[[str, str], None] = lambda base_model, role: None
        self._factory = factory
        self._bases = LoadedBases(factory, report, attempts)
        self._bases.on_lost = lambda base_model, role: self.on_lost(base_model, role)
        self._sampling: dict[str, ParkableBackend] = {}  # by request id
        self._began = asyncio.Event()  # a sample has begun

    async def stand_by(self) -> None:
        await self._factory.stand_by()

    async def start(self, epoch: int) -> ServedModels:
        """Take over what runs, and load each base model once that was never loaded before."""
        return await self._bases.start(epoch)

    @property
    def lost(self) -> str | None:
        return self._factory.lost

    def holding(self, base_model: str) -> AbstractAsyncContextManager[None]:
        return self._bases.holding(base_model)

    async def ready(self, spec: ModelSpec) -> None:
        async with self._bases.using(spec.base_model) as backend:
            await backend.ready(spec)

    def runs(self, base_model: str) -> bool:
        return self._bases.name_of(base_model) in self._bases.backends

    async def residents(self) -> dict[str, int]:
        asked = [backend.residents() for backend in self._bases.backends.values()]
        return {name: at for found in await asyncio.gather(*asked) for name, at in found.items()}

    async def create_model(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        async with self._bases.using(spec.base_model) as backend:
            await backend.create_model(spec, precondition)

    async def delete_model(self, spec: ModelSpec) -> None:
        """Delete a model. Its base model is brought to the devices only if ranks hold the model.

        Raises StateLost if its base model is there, and the ranks do not hold the model: they were
        started again, and versions that only they had are lost.
        """
        name = self._bases.name_of(spec.base_model)
        backend = self._bases.backends.get(name)
        if backend is None:
            return
        if spec.model_id not in await backend.residents():
            if self._bases.is_on_devices(name):
                raise StateLost(f"the ranks do not hold {spec.model_id}")
            return
        async with self._bases.using(spec.base_model) as backend:
            await backend.delete_model(spec)

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        async with self._bases.with_state(spec) as backend:
            return await backend.forward_backward(
                spec, precondition, columns, loss, forward_only, weight
            )

    async def drop_gradients(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        async with self._bases.with_state(spec) as backend:
            await backend.drop_gradients(spec, precondition)

    async def optim_step(
        self, spec: ModelSpec, precondition: OpPrecondition, adam: AdamParams
    ) -> dict[str, float]:
        async with self._bases.with_state(spec) as backend:
            return await backend.optim_step(spec, precondition, adam)

    async def save_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        form: CheckpointForm,
        mark: str,
    ) -> None:
        async with self._bases.with_state(spec) as backend:
            await backend.save_checkpoint(spec, precondition, folder, form, mark)

    async def load_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        with_optimizer: bool,
        mix: Mixture = None,
    ) -> None:
        async with self._bases.with_state(spec) as backend:
            await backend.load_checkpoint(spec, precondition, folder, with_optimizer, mix)

    async def copy_state(self, spec: ModelSpec, precondition: OpPrecondition) -> BackendCopy:
        async with self._bases.with_state(spec) as backend:
            copy = await backend.copy_state(spec, precondition)
        return BackendCopy(handle=(backend, copy), seconds=copy.seconds)

    async def write_state(self, spec: ModelSpec, copy: BackendCopy, folder: str) -> None:
        """Write the copy, which is in host memory, wherever its base model is."""
        backend, own = copy.handle
        async with self._bases.writing(spec.base_model):
            await backend.write_state(spec, own, folder)

    async def restore(self, spec: ModelSpec, precondition: OpPrecondition, folder: str) -> None:
        async with self._bases.using(spec.base_model) as backend:
            await backend.restore(spec, precondition, folder)

    async def renumber(
        self, spec: ModelSpec, precondition: OpPrecondition, keep_optimizer: bool
    ) -> None:
        async with self._bases.with_state(spec) as backend:
            await backend.renumber(spec, precondition, keep_optimizer)

    async def save_for_sampler(
        self, spec: ModelSpec, precondition: OpPrecondition, version: str, written: bool = False
    ) -> SamplerWeights:
        async with self._bases.with_state(spec) as backend:
            return await backend.save_for_sampler(spec, precondition, version, written)

    async def has_sampler(self, weights: SamplerWeights) -> bool:
        async with self._bases.using(weights.base_model) as backend:
            return await backend.has_sampler(weights)

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        """Read the description of saved weights. Only a base model on disk has to come for that."""
        if (loaded := self._bases.backends.get(self._bases.name_of(base_model))) is not None:
            return await loaded.open_sampler(base_model, folder, version)
        async with self._bases.using(base_model) as backend:
            return await backend.open_sampler(base_model, folder, version)

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        await self._bases.drop_sampler(weights)

    def unfreed(self) -> list[SamplerWeights]:
        return self._bases.unfreed()

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        async with self._bases.using(weights.base_model) as backend:
            self._sampling[request_id] = backend
            self._began.set()
            self._began = asyncio.Event()
            try:
                return await backend.sample(request_id, prompt, params, weights, pictures)
            finally:
                self._sampling.pop(request_id, None)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """Return what came of a stream. One that waits for its base model has nothing yet."""
        try:
            async with asyncio.timeout(timeout_s):
                while (backend := self._sampling.get(request_id)) is None:
                    await self._began.wait()
        except TimeoutError:
            return PartialSample()
        return await backend.partial(request_id, have, timeout_s)

    def end_stream(self, request_id: str) -> None:
        for backend in self._bases.backends.values():
            backend.end_stream(request_id)

    def fault(self) -> str | None:
        """Return what cannot be served of the base models that are on the devices."""
        for name, base in self._bases.lock.residency.bases.items():
            backend = self._bases.backends.get(name)
            if base.place is Place.DEVICE and backend and (fault := backend.fault()):
                return f"{name}: {fault}"
        return None

    def waiting(self, base_model: str, request_id: str = "") -> str | None:
        """Return which base models have the devices, and how long that may last."""
        if request_id in self._sampling:
            return None
        lock = self._bases.lock
        name = self._bases.name_of(base_model)
        wait_s = lock.wait_s(name)
        if wait_s is None:
            return None
        if lock.fault(name):  # its text may quote log lines
            return f"base model {name} cannot be loaded now; it is tried again"
        others = [b.name for b in lock.residency.bases.values() if b.place is Place.DEVICE]
        have = f"; the devices have {', '.join(others)}" if others else ""
        return f"base model {name} waits for the devices, about {wait_s:.0f} s{have}"

    async def status(self) -> dict[str, Any]:
        """Return the state of all base models, and the parts of all that are loaded."""
        bases = self._bases.lock.status()
        found: dict[str, Any] = {"base_models": bases, "groups": {}, "engines": [], "devices": {}}
        loaded = dict(self._bases.backends)
        answers = await asyncio.gather(*(backend.status() for backend in loaded.values()))
        for name, own in zip(loaded, answers, strict=True):
            bases[name]["phase"] = own.get("phase")
            found["groups"] |= {f"{name} {role}": g for role, g in own.get("groups", {}).items()}
            found["engines"] += [
                {**engine, "name": f"{name} {engine['name']}"} for engine in own.get("engines", [])
            ]
            found["devices"] |= own.get("devices", {})
            if bases[name]["place"] == Place.DEVICE or "phase" not in found:
                keys = own.keys() - {"groups", "engines", "devices"}
                found |= {key: own[key] for key in keys}
        return found

    async def detach(self) -> None:
        await self._bases.detach()
        await self._factory.detach()

    async def close(self) -> None:
        await self._bases.close()
        self._factory.release()
