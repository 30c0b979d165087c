"""The backend of a service with several base models, which take turns on the same devices.

Each base model has a backend of its own. A call waits until its base model is on the devices, and
holds it there while it runs. `ResidenceLock` decides which one is where.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from skyrl_actors.backends.backend import (
    BackendCopy,
    Capabilities,
    Mixture,
    ServedModels,
)
from skyrl_actors.backends.parkable import BaseModelFactory, ParkableBackend
from skyrl_actors.colocation.residence_lock import ResidenceLock
from skyrl_actors.colocation.residency import Place, Step
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import AdamParams, CheckpointForm, LossCall, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, PartialSample, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights


@dataclass(slots=True)
class _Loaded:
    """The backends of base models that processes hold, by name and by running sample."""

    backends: dict[str, ParkableBackend] = field(default_factory=dict[str, ParkableBackend])
    sampling: dict[str, ParkableBackend] = field(default_factory=dict[str, ParkableBackend])


class CatalogueBackend:
    """Route each call to the backend of its base model.

    `attempts`: failures in a row after which requests get the error of a base model that cannot be
    loaded.
    """

    def __init__(self, factory: BaseModelFactory, report: Callable[[str], None], attempts: int):
        self.on_lost: Callable[[str, str], None] = lambda base_model, role: None
        self._factory = factory
        self._report = report
        self._attempts = attempts
        self._epoch = 0
        self._able: dict[str, Capabilities] = {}
        self._loaded = _Loaded()
        self._dropped: dict[str, list[SamplerWeights]] = {}
        self._began = asyncio.Event()  # a sample has begun
        self._lock: ResidenceLock | None = None

    async def start(self, epoch: int) -> ServedModels:
        """Take over what runs, and load each base model once that was never loaded before."""
        self._epoch = epoch
        residency = await self._factory.reserve()
        self._lock = ResidenceLock(residency, self._carry, self._attempts)
        names = list(residency.bases)
        await asyncio.gather(*(self._take_over(name) for name in names))
        for name in names:
            able = self._able.get(name) or self._factory.known(name)
            if able is None:
                await self._prove(name)
            else:
                self._able[name] = able
        self._lock.open()
        return ServedModels(tuple(self._able[name] for name in names))

    async def _take_over(self, name: str) -> None:
        backend = self._build(name)
        able = await backend.take_over(self._epoch)
        if able is not None:
            self._able[name], self._loaded.backends[name] = able, backend
            self._locked.residency.set_place(name, Place.HOST)

    async def _prove(self, name: str) -> None:
        """Load a base model, which proves it, and park it or end its processes again."""
        self._report(f"base model {name}: loading it once, to prove that it can be served")
        lock = self._locked
        await lock.carry_out(Step("load", name))
        await lock.carry_out(Step("park", name))
        if not lock.residency.may_keep_loaded:
            await lock.carry_out(Step("unload", name))

    @property
    def _locked(self) -> ResidenceLock:
        if self._lock is None:
            raise InternalError("the backend was not started")
        return self._lock

    def _build(self, name: str) -> ParkableBackend:
        backend = self._factory.build(name)
        backend.on_lost = lambda base_model, role: self.on_lost(base_model, role)
        return backend

    async def _carry(self, step: Step) -> None:
        name = step.base
        if step.action == "load":
            await self._load(name)
            await self._drop_later(name)
        elif step.action == "wake":
            await self._loaded.backends[name].resume()
            await self._drop_later(name)
        elif step.action == "park":
            await self._loaded.backends[name].park()
        else:
            self._report(f"base model {name}: its processes end, to make room for another")
            await self._loaded.backends.pop(name).close()

    async def _load(self, name: str) -> None:
        backend = self._build(name)
        self._report(f"base model {name}: loading it")
        try:
            able = (await backend.start(self._epoch)).default
        except BaseException:
            await backend.close()
            raise
        self._loaded.backends[name] = backend
        if self._able.get(name) != able:
            self._able[name] = able
            await self._factory.learn(able)
        for role in able.roles:
            self.on_lost(name, role)

    @property
    def lost(self) -> str | None:
        return self._factory.lost

    def _name(self, base_model: str) -> str:
        """Return the name of a base model. The default one may be left out."""
        return base_model or next(iter(self._locked.residency.bases))

    @asynccontextmanager
    async def _using(self, base_model: str) -> AsyncGenerator[ParkableBackend]:
        """Hold a base model on the devices."""
        name = self._name(base_model)
        async with self._locked.hold(name):
            yield self._loaded.backends[name]

    async def ready(self, spec: ModelSpec) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.ready(spec)

    async def residents(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for backend in list(self._loaded.backends.values()):
            found |= await backend.residents()
        return found

    async def create_model(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.create_model(spec, precondition)

    async def delete_model(self, spec: ModelSpec) -> None:
        """Delete a model. Its base model is brought to the devices only if ranks hold the model."""
        backend = self._loaded.backends.get(self._name(spec.base_model))
        if backend is None or spec.model_id not in await backend.residents():
            return
        async with self._using(spec.base_model) as backend:
            await backend.delete_model(spec)

    async def forward_backward(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
    ) -> LossOutput:
        async with self._using(spec.base_model) as backend:
            return await backend.forward_backward(spec, precondition, columns, loss, forward_only)

    async def drop_gradients(self, spec: ModelSpec, precondition: OpPrecondition) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.drop_gradients(spec, precondition)

    async def optim_step(
        self, spec: ModelSpec, precondition: OpPrecondition, adam: AdamParams
    ) -> dict[str, float]:
        async with self._using(spec.base_model) as backend:
            return await backend.optim_step(spec, precondition, adam)

    async def save_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        form: CheckpointForm,
        mark: str,
    ) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.save_checkpoint(spec, precondition, folder, form, mark)

    async def load_checkpoint(
        self,
        spec: ModelSpec,
        precondition: OpPrecondition,
        folder: str,
        with_optimizer: bool,
        mix: Mixture = None,
    ) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.load_checkpoint(spec, precondition, folder, with_optimizer, mix)

    async def copy_state(self, spec: ModelSpec, precondition: OpPrecondition) -> BackendCopy:
        async with self._using(spec.base_model) as backend:
            copy = await backend.copy_state(spec, precondition)
        return BackendCopy(handle=(backend, copy), seconds=copy.seconds)

    async def write_state(self, spec: ModelSpec, copy: BackendCopy, folder: str) -> None:
        """Write the copy, which is in host memory, wherever its base model is."""
        backend, own = copy.handle
        await backend.write_state(spec, own, folder)

    async def restore(self, spec: ModelSpec, precondition: OpPrecondition, folder: str) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.restore(spec, precondition, folder)

    async def renumber(
        self, spec: ModelSpec, precondition: OpPrecondition, keep_optimizer: bool
    ) -> None:
        async with self._using(spec.base_model) as backend:
            await backend.renumber(spec, precondition, keep_optimizer)

    async def save_for_sampler(
        self, spec: ModelSpec, precondition: OpPrecondition, version: str, written: bool = False
    ) -> SamplerWeights:
        async with self._using(spec.base_model) as backend:
            return await backend.save_for_sampler(spec, precondition, version, written)

    async def has_sampler(self, weights: SamplerWeights) -> bool:
        async with self._using(weights.base_model) as backend:
            return await backend.has_sampler(weights)

    async def open_sampler(self, base_model: str, folder: str, version: str) -> SamplerWeights:
        async with self._using(base_model) as backend:
            return await backend.open_sampler(base_model, folder, version)

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        """Free a version, at once or when its base model is on the devices again."""
        name = self._name(weights.base_model)
        if self._locked.residency.bases[name].place is Place.DEVICE:
            await self._loaded.backends[name].drop_sampler(weights)
        else:
            self._dropped.setdefault(name, []).append(weights)

    async def _drop_later(self, name: str) -> None:
        """Free the versions that were dropped while their base model was parked."""
        for weights in self._dropped.pop(name, ()):
            try:
                await self._loaded.backends[name].drop_sampler(weights)
            except InternalError as error:
                self._report(f"files of version {weights.version} were not freed: {error}")

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        async with self._using(weights.base_model) as backend:
            self._loaded.sampling[request_id] = backend
            self._began.set()
            self._began = asyncio.Event()
            try:
                return await backend.sample(request_id, prompt, params, weights, pictures)
            finally:
                self._loaded.sampling.pop(request_id, None)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """Return what came of a stream. One that waits for its base model has nothing yet."""
        try:
            async with asyncio.timeout(timeout_s):
                while (backend := self._loaded.sampling.get(request_id)) is None:
                    await self._began.wait()
        except TimeoutError:
            return PartialSample()
        return await backend.partial(request_id, have, timeout_s)

    def end_stream(self, request_id: str) -> None:
        for backend in self._loaded.backends.values():
            backend.end_stream(request_id)

    def fault(self) -> str | None:
        """Return what cannot be served of the base models that are on the devices."""
        for name, base in self._locked.residency.bases.items():
            backend = self._loaded.backends.get(name)
            if base.place is Place.DEVICE and backend and (fault := backend.fault()):
                return f"{name}: {fault}"
        return None

    def waiting(self, base_model: str) -> str | None:
        """Return which base models have the devices, and how long that may last."""
        lock = self._locked
        name = self._name(base_model)
        wait_s = lock.wait_s(name)
        if wait_s is None:
            return None
        if fault := lock.fault(name):
            return f"base model {name} cannot be loaded: {fault}"
        others = [b.name for b in lock.residency.bases.values() if b.place is Place.DEVICE]
        have = f"; the devices have {', '.join(others)}" if others else ""
        return f"base model {name} waits for the devices, about {wait_s:.0f} s{have}"

    async def status(self) -> dict[str, Any]:
        """Return the state of all base models, and the parts of all that are loaded."""
        bases = self._locked.status()
        found: dict[str, Any] = {"base_models": bases, "groups": {}, "engines": []}
        for name, backend in list(self._loaded.backends.items()):
            own = await backend.status()
            bases[name]["phase"] = own.get("phase")
            found["groups"] |= {f"{name} {role}": g for role, g in own.get("groups", {}).items()}
            found["engines"] += [
                {**engine, "name": f"{name} {engine['name']}"} for engine in own.get("engines", [])
            ]
            if bases[name]["place"] == Place.DEVICE or "phase" not in found:
                keys = own.keys() - {"groups", "engines"}
                found |= {key: own[key] for key in keys}
        return found

    async def detach(self) -> None:
        await self._stop_moving()
        await asyncio.gather(*(backend.detach() for backend in self._loaded.backends.values()))
        await self._factory.detach()

    async def close(self) -> None:
        await self._stop_moving()
        for backend in self._loaded.backends.values():
            with suppress(InternalError):
                await backend.close()
        self._factory.release()

    async def _stop_moving(self) -> None:
        if self._lock is not None:
            await self._lock.close()
