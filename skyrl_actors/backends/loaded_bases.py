"""The base models of a service that processes hold, and their ways to the devices and back.

Each base model has a backend of its own. `ResidenceLock` decides which one is where, and this
module carries that out.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from skyrl_actors.backends.backend import Capabilities, ServedModels
from skyrl_actors.backends.parkable import BaseModelFactory, ParkableBackend
from skyrl_actors.colocation.residence_lock import ResidenceLock
from skyrl_actors.colocation.residency import Place, Step
from skyrl_actors.messages.errors import InternalError, InvalidRequest, PartDown
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.weights import SamplerWeights


class LoadedBases:
    """The backends of the loaded base models, by name.

    `attempts`: failures in a row after which requests get the error of a base model that cannot be
    loaded. `on_lost` is called with base model and role after ranks started without any model.
    """

    def __init__(self, factory: BaseModelFactory, report: Callable[[str], None], attempts: int):
        self.backends: dict[str, ParkableBackend] = {}
        self.on_lost: Callable[[str, str], None] = lambda base_model, role: None
        self._factory = factory
        self._report = report
        self._attempts = attempts
        self._epoch = 0
        self._able: dict[str, Capabilities] = {}
        self._dropped = defaultdict[str, deque[SamplerWeights]](deque)
        self._writing: Counter[str] = Counter()  # snapshots that are written, by base model
        self._wrote = asyncio.Event()  # one of them ended
        self._held: dict[asyncio.Task[Any] | None, str] = {}  # by the task that holds it
        self._lock: ResidenceLock | None = None

    async def start(self, epoch: int) -> ServedModels:
        """Take over what runs, and load each base model once that was never loaded before."""
        self._epoch = epoch
        residency = await self._factory.reserve()
        self._lock = ResidenceLock(residency, self._carry, self._attempts)
        names = list(residency.bases)
        took_over = [self._take_over(name) for name in names]
        for error in await asyncio.gather(*took_over, return_exceptions=True):
            if error is not None:
                raise error
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
        try:
            able = await backend.take_over(self._epoch)
        except BaseException:
            await backend.detach()  # otherwise it would restart parts beside its successor
            raise
        if able is not None:
            self._report(f"took over base model {name}")
            self._able[name], self.backends[name] = able, backend
            self.lock.residency.set_place(name, Place.HOST)

    async def _prove(self, name: str) -> None:
        """Load a base model, which proves it, and park it."""
        self._report(f"base model {name}: loading it once, to prove that it can be served")
        lock = self.lock
        if (step := lock.residency.to_unload()) is not None:
            await lock.carry_out(step)
        await lock.carry_out(Step("load", name))
        await lock.carry_out(Step("park", name))

    @property
    def lock(self) -> ResidenceLock:
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
            await self.backends[name].resume()
            await self._drop_later(name)
        elif step.action == "park":
            await self.backends[name].park()
        else:
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        """End the processes of a parked base model, after the snapshots that they write."""
        self._report(f"base model {name}: its processes end, to make room for another")
        while self._writing[name]:
            await self._wrote.wait()
        await self._close(name)

    async def _load(self, name: str) -> None:
        backend = self._build(name)
        self._report(f"base model {name}: loading it")
        try:
            able = (await backend.start(self._epoch)).default
        except BaseException:
            await backend.close()
            raise
        if self._able.get(name) != able:
            self._able[name] = able
            try:
                await self._factory.learn(able)
            except OSError as error:
                self._report(f"base model {name}: its facts were not stored: {error}")
        self.backends[name] = backend
        for role in able.roles:
            self.on_lost(name, role)

    def name_of(self, base_model: str) -> str:
        """Return the name of a base model. The default one may be left out."""
        return base_model or next(iter(self.lock.residency.bases))

    @asynccontextmanager
    async def using(self, base_model: str) -> AsyncGenerator[ParkableBackend]:
        """Hold a base model on the devices, unless the caller does already."""
        name = self.name_of(base_model)
        if name not in self.lock.residency.bases:
            raise InvalidRequest(f"base model {name!r} is no longer served")
        if self._held.get(asyncio.current_task()) == name:
            yield self.backends[name]
            return
        async with self.lock.hold(name):
            yield self.backends[name]

    @asynccontextmanager
    async def with_state(self, spec: ModelSpec) -> AsyncGenerator[ParkableBackend]:
        """Hold a base model for a call on the state of a model.

        Raises PartDown if the ranks were started again while the call waited, so that the caller
        restores the model first.
        """
        before = self.backends.get(self.name_of(spec.base_model))
        async with self.using(spec.base_model) as backend:
            if backend is not before:
                raise PartDown(f"base model {spec.base_model} was loaded while this call waited")
            yield backend

    @asynccontextmanager
    async def holding(self, base_model: str) -> AsyncGenerator[None]:
        """Hold a base model on the devices for several calls of this task.

        Tasks that it creates do not hold it.
        """
        task, name = asyncio.current_task(), self.name_of(base_model)
        before = self._held.get(task)
        async with self.using(base_model):
            self._held[task] = name
            try:
                yield
            finally:
                if before is None:
                    del self._held[task]

    @asynccontextmanager
    async def writing(self, base_model: str) -> AsyncGenerator[None]:
        """Keep the processes of a base model until a snapshot is written."""
        name = self.name_of(base_model)
        self._writing[name] += 1
        try:
            yield
        finally:
            self._writing[name] -= 1
            self._wrote.set()
            self._wrote = asyncio.Event()

    def is_on_devices(self, name: str) -> bool:
        return self.lock.residency.bases[name].place is Place.DEVICE

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        """Free a version, at once or when its base model is on the devices again."""
        name = self.name_of(weights.base_model)
        if name not in self.lock.residency.bases:
            return  # of a base model that is no longer served
        if self.is_on_devices(name):
            await self.backends[name].drop_sampler(weights)
        else:
            self._dropped[name].append(weights)

    def unfreed(self) -> list[SamplerWeights]:
        """Return dropped versions whose files may still be there, of all base models."""
        lists = (*self._dropped.values(), *(one.unfreed() for one in self.backends.values()))
        return [weights for those in lists for weights in those]

    async def _drop_later(self, name: str) -> None:
        """Free the versions that were dropped while their base model was parked."""
        while dropped := self._dropped.get(name):
            try:
                await self.backends[name].drop_sampler(dropped[0])
            except InternalError as error:
                self._report(f"files of version {dropped[0].version} were not freed: {error}")
            dropped.popleft()

    async def detach(self) -> None:
        """Leave all base models where they are, for the next controller."""
        await self._stop_moving()
        await asyncio.gather(*(backend.detach() for backend in self.backends.values()))

    async def close(self) -> None:
        """End the processes of all base models."""
        await self._stop_moving()
        for name in list(self.backends):
            await self._close(name)

    async def _close(self, name: str) -> None:
        closing = self.backends[name].close()
        (error,) = await asyncio.gather(closing, return_exceptions=True)
        if error is not None:  # the next load, or `stop`, ends what is left
            self._report(f"base model {name} did not end cleanly: {error!r}")
        self._dropped[name].extend(self.backends.pop(name).unfreed())

    async def _stop_moving(self) -> None:
        if self._lock is not None:
            await self._lock.close()
