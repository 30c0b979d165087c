"""A pool of engines: routing of samples, delivery of weights, restarts.

Every engine has a lock keyed by the version of its full weights. Samples of one version share it;
loading another version waits for them. LoRA samples need the base's weights plus their adapter.
When an engine dies, its samples raise StateLost and the caller repeats them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.config.engines import EngineConfig
from skyrl_actors.engines.check_prompt import continuation, opening
from skyrl_actors.engines.interface import (
    BASE_VERSION,
    CHECK,
    EngineProcess,
    EngineStatus,
)
from skyrl_actors.engines.load_times import LoadTimes, record_transfer
from skyrl_actors.engines.local_engine import DROPPED, LocalEngine
from skyrl_actors.engines.logprob_check import SCORING, LogprobCheck
from skyrl_actors.engines.memory import EngineMemory
from skyrl_actors.engines.own_engines import needs_own, why_none
from skyrl_actors.engines.replica import EngineReplica, Incarnation
from skyrl_actors.engines.routing import affinity_key, choose, loads_of
from skyrl_actors.engines.streamed import StreamedSamples
from skyrl_actors.engines.versions import VersionTable, full_version, once
from skyrl_actors.messages.errors import (
    InternalError,
    InvalidRequest,
    PartDown,
    StateLost,
    WeightsGone,
)
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest, WeightStream
from skyrl_actors.transfer.folders import full_manifests
from skyrl_actors.transfer.transport import EnginePlace

Deliver = Callable[
    [WeightManifest, ActorHandle[Any] | None, EnginePlace, Callable[[], int], float],
    Awaitable[WeightStream | None],
]
T = TypeVar("T")


class EnginePool:
    """Route samples to engines and keep their weights current."""

    def __init__(
        self,
        config: EngineConfig,
        base_folder: Path,
        deliver: Deliver,
        logprob_check: LogprobCheck,
    ):
        self.config = config
        self.logprob_check = logprob_check
        self.engines: list[EngineReplica] = []
        self.load_times = LoadTimes()
        self._base_folder = base_folder
        self._deliver = deliver
        self.versions = VersionTable()
        self.streamed = StreamedSamples()
        self._changed = asyncio.Event()
        self.memory = EngineMemory(self.living_own, config.sleep_level)

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        return [engine.actor for engine in self._living() if engine.actor is not None]

    @property
    def has_own(self) -> bool:
        """Whether the pool has engines of this service, which take full weights."""
        return any(engine.managed for engine in self.engines)

    def healthy(self) -> bool:
        """Return whether an engine can serve.

        If the service has engines of its own, one of these must be healthy: engines by URL cannot
        serve every request.
        """
        return bool(self._living(managed=self.has_own))

    def living_own(self) -> list[EngineReplica]:
        return self._living(managed=True)

    def _living(self, managed: bool = False) -> list[EngineReplica]:
        return [e for e in self.engines if e.health == "HEALTHY" and (e.managed or not managed)]

    async def take_over(self, actors: remote.Actors) -> list[bool]:
        """Take over an earlier controller's engines; return for each engine whether it runs."""
        for engine in self.engines:
            engine.on_change = self._changed.set
        return await asyncio.gather(*(engine.take_over(actors) for engine in self.engines))

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines))

    def prepare_with(self, prepare: Callable[[], Awaitable[None]]) -> None:
        """Set what is awaited before an engine's process starts, perhaps on another node."""
        for engine in self.engines:
            engine.prepare = prepare

    def join_with(self, joining: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Set the context for restarted engines that join: a phase with engines awake."""
        for engine in self.engines:
            engine.joining = joining

    async def any_healthy(
        self, weights: SamplerWeights, params: SamplingParams, has_images: bool = False
    ) -> None:
        """Wait for a healthy engine that can serve this sample.

        Raises InternalError, with the last reason of each engine, once all were given up.
        """
        managed = needs_own(weights, params, has_images)
        able = [e for e in self.engines if e.managed] if managed else self.engines
        if not able:
            raise InvalidRequest(why_none(params, has_images))
        if len(self._living(managed)) == len(self.engines):
            return
        for engine in self.engines:
            engine.restart_if_dead()
        while not self._living(managed):
            for engine in self.engines:
                engine.restart_if_dead()
            if all(engine.given_up for engine in able):
                raise InternalError(
                    "; ".join(f"{e.name} keeps dying and was given up: {e.reason}" for e in able)
                )
            self._changed.clear()
            await self._changed.wait()

    def goes_outside(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        has_images: bool = False,
    ) -> bool:
        """Return whether the sample goes to an engine by URL, which needs no local device."""
        own = needs_own(weights, params, has_images)
        if own or all(engine.managed for engine in self.engines):
            return False
        return not self._choose(self._living(), prompt, weights).managed

    def _choose(
        self, living: list[EngineReplica], prompt: tuple[int, ...], weights: SamplerWeights
    ) -> EngineReplica:
        if not living:
            raise PartDown("no engine runs now")
        adapter = weights.adapter
        given = () if adapter is None else self.versions.deliveries_of(adapter.version)
        loads = loads_of(living, full_version(weights), given)
        return living[choose(loads, affinity_key(weights.version, prompt))]

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        weights: SamplerWeights,
        outside: bool = False,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        """Sample on one engine. `outside`: on an engine by URL.

        Raises StateLost when the engine dies during the sample.
        """
        wanted = self.versions.register(weights)
        able = [e for e in self._living() if e.managed != outside]
        engine = self._choose(able, prompt, weights)
        engine.wanted, incarnation = wanted, engine.incarnation
        with engine.sampling():
            async with engine.lock.hold(wanted):
                engine.check_incarnation(incarnation)
                if weights.adapter:
                    await self._ensure_delivered(engine, weights.adapter)
                await self._check_logprobs(engine, incarnation, request_id, weights)
                engine.check_incarnation(incarnation)
                if params.stream:
                    self.streamed.record(request_id, engine)
                asked = replace(params, num_samples=1) if params.is_repeated else params
                output = await engine.ask(
                    EngineProcess.sample,
                    request_id,
                    prompt,
                    asked,
                    weights.adapter,
                    weights.version,
                    pictures,
                )
        engine.worked()
        if params.is_repeated:
            return replace(output, sequences=output.sequences * params.num_samples)
        return output

    async def _check_logprobs(
        self,
        engine: EngineReplica,
        incarnation: Incarnation,
        request_id: str,
        weights: SamplerWeights,
    ) -> None:
        """Check the engine's logprobs once for each version, before its first answer.

        Samples that arrive meanwhile wait for the same check.
        """
        if not self.logprob_check.can_compare(weights):
            return
        pictures = self.logprob_check.pictures_in(weights.scored_prompt)
        if pictures and not engine.managed:
            return  # engines by URL get no images

        async def check() -> None:
            engine.check_incarnation(incarnation)
            scored = await engine.ask(
                EngineProcess.sample,
                request_id + CHECK,
                weights.scored_prompt,
                SCORING,
                weights.adapter,
                weights.version,
                pictures,
            )
            self.logprob_check.compare(engine.name, weights, scored)

        await once(self.versions[weights.version].checks, incarnation, check)

    async def learn_check_prompt(self) -> None:
        """Take the logprob check's prompt from an engine, unless it is known or the check is off.

        Engines of this service made theirs at their start. One by URL generates it now.
        """
        living = self._living(managed=self.has_own)
        if living and self.logprob_check.wants_prompt:
            with suppress(InternalError):  # later versions are compared
                self.logprob_check.prompt = await self._check_prompt(living[0])

    async def _check_prompt(self, engine: EngineReplica) -> tuple[int, ...]:
        if engine.managed:
            return (await engine.status()).check_prompt
        longest = self.config.max_model_len
        prompt = opening(
            self._base_folder, self.logprob_check.vocab_size, longest, with_image=False
        )
        how = continuation(prompt, longest)
        output = await engine.ask(
            EngineProcess.sample, "continuation", prompt, how, None, BASE_VERSION
        )
        return prompt + tuple(output.sequences[0].tokens.tolist())

    async def preload(self, weights: SamplerWeights) -> None:
        """Load full weights into engines that dropped theirs, before the KV cache is allocated."""
        wanted = self.versions.register(weights)

        async def load(engine: EngineReplica) -> None:
            async with engine.lock.hold(wanted):
                pass

        empty = [e for e in self.living_own() if e.lock.state == DROPPED and not e.lock.busy]
        for error in await asyncio.gather(*map(load, empty), return_exceptions=True):
            if error is not None:
                raise error

    def needless(self) -> tuple[str, ...]:
        """Return full versions that need no copy when their weights change."""
        return self.versions.needless(
            {
                e.lock.state if e.health == "HEALTHY" and e.lock.settled else DROPPED
                for e in self.engines
                if e.managed
            }
        )

    def needs_weights(self) -> bool:
        return any(
            engine.lock.state == DROPPED and not engine.lock.busy for engine in self.living_own()
        )

    async def drop(self, weights: SamplerWeights) -> None:
        """Remove a version; the caller frees its files."""
        self.versions.drop(weights.version)
        for engine in self.engines:
            if engine.wanted == weights.version:
                engine.wanted = BASE_VERSION
        if weights.adapter:
            await self._each(
                lambda engine: engine.ask(EngineProcess.drop_adapters, (weights.version,))
            )

    async def adapts_head(self) -> bool:
        """Return whether all living engines of this service take adapters on the output layer.

        True if none lives; the first sample fails then if the model takes none.
        """
        return all([(await engine.status()).adapts_head for engine in self._living(managed=True)])

    async def status(self) -> list[EngineStatus]:
        return [await engine.status() for engine in self._living()]

    async def stop(self, timeout_s: float) -> None:
        """Let running samples end, then stop the engines.

        Engines stop themselves, because killing them leaks shared memory.
        """
        own = [(engine.name, engine.actor) for engine in self._living() if engine.actor is not None]
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self.engines))
        # Supervision ends first, so that the exits below do not count as losses.
        await asyncio.gather(*(engine.detach() for engine in self.engines))
        try:
            await remote.gather(
                [actor.stop.remote() for _, actor in own],
                [name for name, _ in own],
                "engine stop",
                timeout_s,
            )
        finally:
            await asyncio.gather(*(engine.close() for engine in self.engines))

    async def load(self, engine: LocalEngine, version: str, lock: StateLock[str]) -> None:
        """Load a full version into an engine, once engines have memory for weights.

        The waiting sample's phase may have ended. The load then waits until engines are awake.
        """
        while True:
            await self.memory.have_weights.wait()
            async with engine.moving:
                if engine.lock is not lock or engine.health == "DEAD":
                    raise PartDown(f"{engine.name} died before it was given {version}")
                if self.memory.have_weights.is_set():
                    return await self._load(engine, version)

    async def _load(self, engine: EngineReplica, version: str) -> None:
        started = time.perf_counter()
        entry, incarnation = self.versions[version], engine.incarnation
        entry.checks.pop(incarnation, None)  # every load is compared again
        # A version that was let go and is loaded again must be written when its weights change.
        entry.loaded = False
        streams: tuple[WeightStream | None, ...] = ()
        parts = entry.parts
        if version == BASE_VERSION:
            parts = full_manifests(self._base_folder, BASE_VERSION)
        elif not parts:
            raise WeightsGone(f"{version} was dropped")
        else:
            streams = tuple([await self._ensure_delivered(engine, part) for part in parts])
        engine.check_incarnation(incarnation)
        await engine.ask(EngineProcess.load_full, version, parts, streams)
        entry.loaded = True
        took = time.perf_counter() - started
        self.load_times.loaded(version, engine.name, took, sum(part.num_bytes for part in parts))

    async def _ensure_delivered(
        self, engine: EngineReplica, manifest: WeightManifest
    ) -> WeightStream | None:
        """Deliver a version to an engine once for all samples that wait for it.

        A stream serves one load, so it is opened again for each load.
        """
        deliveries = self.versions[manifest.version].deliveries
        incarnation, actor = engine.incarnation, engine.actor

        def possible() -> int:
            return sum(e.lock.state != manifest.version for e in self.living_own())

        async def deliver() -> WeightStream | None:
            began = time.perf_counter()
            stream = await self._deliver(
                manifest, actor, engine.place, possible, self.load_times.pause_s
            )
            if manifest.kind == "lora":  # vLLM loads it with its first sample
                took, what = time.perf_counter() - began, f"{manifest.version} to {engine.name}"
                record_transfer(what, took, manifest.num_bytes)
            return stream

        stream = await once(deliveries, incarnation, deliver)
        if stream is not None:
            deliveries.pop(incarnation, None)
        return stream

    async def _each(self, work: Callable[[EngineReplica], Awaitable[Any]]) -> None:
        """Run `work` on every living engine. An engine that dies restarts; the others go on."""

        async def one(engine: EngineReplica) -> None:
            with suppress(StateLost):  # `ask` has begun the restart
                await work(engine)

        await asyncio.gather(*(one(engine) for engine in self._living()))
