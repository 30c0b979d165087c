"""Many engines as one: routing, which version each holds, sleep and wake.

Every engine has a gate keyed by the version of its full weights: samples of one version share it, and loading another
version waits for them. LoRA samples need the base's weights plus their adapter. An engine that dies takes nothing with
it but time: its samples raise StateLost, and the caller asks again.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from placement.types import Plan
from skyrl_actors import remote
from skyrl_actors.colocation.gate import Gate
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.engines import EngineConfig
from skyrl_actors.engines.agreement import SCORING, Agreement
from skyrl_actors.engines.engine import DROPPED, Engine, EngineSite
from skyrl_actors.engines.external import ExternalMember
from skyrl_actors.engines.interface import BASE_VERSION, CHECK, EngineSpec, EngineStatus
from skyrl_actors.engines.member import Member
from skyrl_actors.engines.memory import EngineMemory
from skyrl_actors.engines.routing import EngineLoad, affinity_key, choose
from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest, PartDown, StateLost
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest, WeightStream
from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.spans import SPANS, Span
from skyrl_actors.transfer.base import EnginePlace
from skyrl_actors.transfer.folders import full_manifests

Deliver = Callable[[WeightManifest, ActorHandle | None, EnginePlace], Awaitable[WeightStream | None]]
T = TypeVar("T")
NO_SCORES = (
    "target_prompt_logprobs, prompt_alt_tokens_k and tempered_logprobs need engines of this service, and engine.num_engines is 0"
)
NO_FULL_WEIGHTS = "full weights can be sampled only by engines of this service, and engine.num_engines is 0"
AFTER_LOSS_S = 0.2


class EnginePool:
    def __init__(self, service: str, config: EngineConfig, base_folder: Path, deliver: Deliver, agreement: Agreement):
        self._service = service
        self.config = config
        self.agreement = agreement
        self.engines: list[Member] = []
        self.load_seconds: list[float] = []
        self._base_folder = base_folder
        self._deliver = deliver
        self._full: dict[str, tuple[WeightManifest, ...]] = {}
        self._loaded: set[str] = set()  # full versions that were in an engine, now or earlier
        self._changed = asyncio.Event()
        self.memory = EngineMemory(self.living_own, config.sleep_level)
        self._streams: dict[str, asyncio.Future[tuple[Member, str]]] = {}  # where samples run that somebody reads along

    @property
    def actors(self) -> list[ActorHandle]:
        return [engine.actor for engine in self._living() if engine.actor is not None]

    @property
    def has_own(self) -> bool:
        """Engines of this service, whose memory it moves and which take full weights."""
        return any(engine.ours for engine in self.engines)

    def healthy(self) -> bool:
        """Of its own, one at least, where it has any: others can not serve all that was promised."""
        return bool(self._living(ours=self.has_own))

    def living_own(self) -> list[Member]:
        return self._living(ours=True)

    def _living(self, ours: bool = False) -> list[Member]:
        return [engine for engine in self.engines if engine.health == "HEALTHY" and (engine.ours or not ours)]

    async def take_over(self) -> list[bool]:
        """For each engine, whether an earlier controller's is used on. What it had more of is ended."""
        wanted = {engine.site.name for engine in self.engines if isinstance(engine, Engine)}
        await remote.end_named([name for name in remote.names_with(f"{self._service}:engine:") if name not in wanted])
        for engine in self.engines:
            engine.on_change = self._changed.set
        return await asyncio.gather(*(engine.take_over() for engine in self.engines))

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines))

    def join_with(self, joining: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """How a restarted engine takes its place: in a phase in which engines are awake."""
        for engine in self.engines:
            engine.joining = joining

    async def any_healthy(self, weights: SamplerWeights, params: SamplingParams) -> None:
        """Wait for an engine that can do this. Raises InternalError, with their last words, when all were given up."""
        ours = needs_own(weights, params)
        able = [engine for engine in self.engines if engine.ours or not ours]
        if not able:
            raise InvalidRequest(NO_SCORES if params.scores_prompt or params.tempers else NO_FULL_WEIGHTS)
        for engine in self.engines:
            engine.revive()
        while not self._living(ours):
            for engine in self.engines:
                engine.revive()
            if all(engine.given_up for engine in able):
                raise InternalError("; ".join(f"{e.name} keeps dying and was given up: {e.reason}" for e in able))
            self._changed.clear()
            await self._changed.wait()

    def goes_outside(self, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights) -> bool:
        """Whether it is for an engine by URL, which needs no device of this service."""
        if needs_own(weights, params) or all(engine.ours for engine in self.engines):
            return False
        return not self._chosen(self._living(), prompt, weights).ours

    def _chosen(self, living: list[Member], prompt: tuple[int, ...], weights: SamplerWeights) -> Member:
        if not living:
            raise PartDown("no engine runs now")
        wanted = full_version(weights)
        adapter = weights.adapter.version if weights.adapter else None
        loads = [
            EngineLoad(
                e.name, e.gate.num_holders, e.gate.num_waiting, e.gate.state == wanted, adapter is None or adapter in e.delivered
            )
            for e in living
        ]
        return living[choose(loads, affinity_key(weights.version, prompt))]

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights, outside: bool = False
    ) -> SampleOutput:
        """Raises StateLost when the engine died under it. `outside`: by an engine of somebody else."""
        wanted = self._register(weights)
        engine = self._chosen([e for e in self._living() if e.ours != outside], prompt, weights)
        engine.wanted, gate = wanted, engine.gate
        async with gate.hold(wanted):
            if weights.adapter:
                await self._delivered_to(engine, weights.adapter)
            if engine.gate is not gate:
                raise PartDown(f"{engine.name} was made anew while this sample waited for its weights")
            await self._agreed(engine, request_id, weights)
            if params.stream:
                self._told_where(request_id, engine)
            asked = replace(params, num_samples=1) if params.is_repeated else params
            output = await engine.ask("sample", request_id, prompt, asked, weights.adapter, weights.version)
        engine.worked()
        return replace(output, sequences=output.sequences * params.num_samples) if params.is_repeated else output

    async def _agreed(self, engine: Member, request_id: str, weights: SamplerWeights) -> None:
        """Once for each engine and version, before its first answer; samples that come meanwhile wait for it too."""
        version = weights.version
        if not self.agreement.can_compare(weights):
            return
        if version not in engine.agreed:

            async def check() -> None:
                scored = await engine.ask("sample", request_id + CHECK, self.agreement.prompt, SCORING, weights.adapter, version)
                self.agreement.compare(engine.name, weights, scored)

            task = engine.agreed[version] = asyncio.ensure_future(check())
            task.add_done_callback(lambda done: _forget_failed(engine.agreed, version, done))
        await asyncio.shield(engine.agreed[version])

    def _told_where(self, attempt_id: str, engine: Member) -> None:
        request_id = attempt_id.rpartition(".")[0]
        if request_id not in self._streams or self._streams[request_id].done():
            self._streams[request_id] = asyncio.get_running_loop().create_future()
        self._streams[request_id].set_result((engine, attempt_id))

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """What came of a sample behind its first `have` tokens, as soon as something did; empty when nothing did in time."""
        place = self._streams.setdefault(request_id, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(timeout_s):
                engine, attempt_id = await asyncio.shield(place)
                return await engine.ask("partial", attempt_id, have, timeout_s)
        except TimeoutError:
            if not place.done():
                self._streams.pop(request_id, None)
            return PartialSample()
        except StateLost:
            await asyncio.sleep(AFTER_LOSS_S)  # it is run again elsewhere, with the same seed and so the same tokens
            return PartialSample()

    def end_stream(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def preload(self, weights: SamplerWeights) -> None:
        """Load full weights into the engines that lost theirs, before the KV cache is given memory."""
        wanted = self._register(weights)
        for engine in self.living_own():
            if engine.gate.state == DROPPED and not engine.gate.busy:
                async with engine.gate.hold(wanted):
                    pass

    def needless(self, in_use: Collection[str]) -> tuple[str, ...]:
        """Full versions of which no copy need be kept when their weights change: all engines hold it, or one did and nobody asks for it
        any more."""
        own = [engine for engine in self.engines if engine.ours]
        staying = {e.gate.state if e.health == "HEALTHY" and e.gate.settled else DROPPED for e in own}
        return tuple(version for version in self._loaded if version not in in_use or staying == {version})

    def needs_weights(self) -> bool:
        return any(engine.gate.state == DROPPED and not engine.gate.busy for engine in self.living_own())

    async def drop(self, weights: SamplerWeights) -> None:
        """Forget a version; the caller frees its files."""
        self._full.pop(weights.version, None)
        self._loaded.discard(weights.version)
        for engine in self.engines:
            engine.delivered.pop(weights.version, None)
            engine.agreed.pop(weights.version, None)
            if engine.wanted == weights.version:
                engine.wanted = BASE_VERSION
        if weights.adapter:
            await self._each(lambda engine: engine.ask("drop_adapters", (weights.version,)))

    async def adapts_head(self) -> bool:
        """As its own engines that live say; where none does, it shows at the first sample."""
        return all([(await engine.status()).adapts_head for engine in self._living(ours=True)])

    async def status(self) -> list[EngineStatus]:
        return [await engine.status() for engine in self._living()]

    async def stop(self, timeout_s: float) -> None:
        """What runs may end first. Then by their own means: killing them leaves shared memory behind."""
        own = [(engine.name, engine.actor) for engine in self._living() if engine.actor is not None]
        await asyncio.gather(*(engine.drain(timeout_s) for engine in self.engines))
        await asyncio.gather(*(engine.detach() for engine in self.engines))  # their end is no loss now
        try:
            await remote.gather([actor.stop.remote() for _, actor in own], [name for name, _ in own], "engine stop", timeout_s)
        finally:
            await asyncio.gather(*(engine.close() for engine in self.engines))

    def _register(self, weights: SamplerWeights) -> str:
        if full_version(weights) != BASE_VERSION:
            self._full[weights.version] = weights.parts
        return full_version(weights)

    async def load(self, engine: Engine, version: str, gate: Gate[str]) -> None:
        """A sample that waits for these may have been left behind by its phase: then not before engines are awake again."""
        while True:
            await self.memory.have_weights.wait()
            async with engine.moving:
                if engine.gate is not gate or engine.health == "DEAD":
                    raise PartDown(f"{engine.name} died before it was given {version}")
                if self.memory.have_weights.is_set():
                    return await self._load(engine, version)

    async def _load(self, engine: Member, version: str) -> None:
        started = time.perf_counter()
        engine.agreed.pop(version, None)  # what arrives anew is compared anew
        self._loaded.discard(version)  # if it was let go it is wanted again, and must be written when it is computed anew
        streams: tuple[WeightStream | None, ...] = ()
        if version == BASE_VERSION:
            parts = full_manifests(self._base_folder, BASE_VERSION)
        else:
            parts = self._full[version]
            streams = tuple([await self._delivered_to(engine, part) for part in parts])
        await engine.ask("load_full", version, parts, streams)
        self._loaded.add(version)
        took = time.perf_counter() - started
        self.load_seconds = [*self.load_seconds[-99:], took]
        _counted(f"{version} to {engine.name}", took, sum(part.num_bytes for part in parts))

    async def _delivered_to(self, engine: Member, manifest: WeightManifest) -> WeightStream | None:
        """Many samples of a new version start together; one delivery serves them all. A stream serves one load."""
        deliveries = engine.delivered
        if manifest.version not in deliveries:
            delivery = deliveries[manifest.version] = asyncio.ensure_future(self._deliver(manifest, engine.actor, engine.place))
            delivery.add_done_callback(lambda done: _forget_failed(deliveries, manifest.version, done))
            if manifest.kind == "lora":
                began, name = time.perf_counter(), f"{manifest.version} to {engine.name}"
                delivery.add_done_callback(lambda done: _came(done, name, time.perf_counter() - began, manifest.num_bytes))
        stream = await asyncio.shield(deliveries[manifest.version])
        if stream is not None:
            deliveries.pop(manifest.version, None)
        return stream

    async def _each(self, work: Callable[[Member], Awaitable[Any]]) -> None:
        """On every living engine. One that dies of it is made anew in its own time and does not fail the others."""

        async def one(engine: Member) -> None:
            with suppress(StateLost):  # `ask` has seen to it
                await work(engine)

        await asyncio.gather(*(one(engine) for engine in self._living()))


def needs_own(weights: SamplerWeights, params: SamplingParams) -> bool:
    """Engines by URL serve the base and adapters, no scores along a prompt, and logprobs at temperature 1."""
    return full_version(weights) != BASE_VERSION or params.scores_prompt or params.tempers


def full_version(weights: SamplerWeights) -> str:
    """The version of full weights an engine must hold: an adapter works over the base."""
    return BASE_VERSION if weights.adapter or not weights.parts else weights.version


def build_pool(
    config: ClusterConfig, base_folder: Path, plan: Plan, reserved: PlacementGroup, devices: Mapping[int, str],
    environment: dict[str, str], deliver: Deliver, epoch: int, detached: bool, say: Callable[[str], None],
) -> EnginePool:  # fmt: skip
    """`devices`: ids of the GPUs of slots, where an engine has several."""
    engine = config.engine
    share = config.placement.colocated_share if config.placement.shares("engine") else 1.0
    agreement = Agreement(config.logprob_check, config.logprob_bound, config.policy.dtype, say)
    pool = EnginePool(config.name, engine, base_folder, deliver, agreement)
    for index, slots in enumerate(plan.actors_of("engine")):
        over_nodes = len({slot.node for slot in slots}) > 1
        ids = () if over_nodes else tuple(devices[slot.index] for slot in slots if slot.index in devices)
        spec = EngineSpec(
            f"engine[{index}]", str(base_folder), config.placement.device, engine.dtype, engine.max_model_len,
            engine.max_num_seqs, engine.max_num_batched_tokens, engine.kv_cache_bytes, engine.max_loras,
            config.lora.max_rank, config.engine_adapters, engine.enforce_eager, engine.call_timeout_s,
            engine.tensor_parallel, engine.pipeline_parallel, ids, over_nodes, engine.in_flight == "keep",
            takes_full_weights=config.lora.max_full_models > 0 or engine.sleep_level == "2",
        )  # fmt: skip
        own = {**environment, "OMP_NUM_THREADS": str(engine.num_threads)}
        if over_nodes:  # vLLM makes its workers as Ray actors in these bundles
            bundles = ",".join(str(slot.index) for slot in slots)
            own |= {"VLLM_RAY_BUNDLE_INDICES": bundles, "VLLM_RAY_PER_WORKER_GPUS": str(share), "RAY_ADDRESS": "auto"}
        on_gpu = plan.device == "GPU" and len(slots) == 1
        site = EngineSite(
            spec, f"{config.name}:engine:{index}", reserved, slots[0].index, share, on_gpu, own, detached, over_nodes
        )  # fmt: skip
        beside = [rank for rank, slot in enumerate(plan.slots_of("policy")) if slot.index == slots[0].index]
        place = EnginePlace(engine.num_devices, *beside)
        pool.engines.append(Engine(site, engine, config.restart, epoch, pool.load, say, place))
    pool.engines += external_members(config, say)
    return pool


def external_members(config: ClusterConfig, say: Callable[[str], None]) -> list[ExternalMember]:
    """Raises ConfigError when a key is not there."""
    found = []
    for number, asked in enumerate(config.engine.external):
        key = os.environ.get(asked.api_key_env) if asked.api_key_env else None
        if asked.api_key_env and key is None:
            raise ConfigError(
                f"engine.external {asked.url}: the controller has no variable {asked.api_key_env}; set it before `serve`"
            )
        found.append(ExternalMember(f"external[{number}]", asked, key, config.engine, config.restart, say))
    return found


def _counted(what: str, took: float, num_bytes: int) -> None:
    SPANS.add(Span(what, "transfers", time.time() - took, took, attributes={"bytes": num_bytes}))
    COUNTS.add("transfers")
    COUNTS.add("transfer_seconds", took)
    COUNTS.add("transfer_bytes", num_bytes)


def _came(done: asyncio.Future[Any], what: str, took: float, num_bytes: int) -> None:
    """An adapter, where the engine reads it; vLLM loads it with its first sample."""
    if not done.cancelled() and done.exception() is None:
        _counted(what, took, num_bytes)


def _forget_failed(tasks: dict[str, asyncio.Task[T]], version: str, task: asyncio.Task[T]) -> None:
    if task.cancelled() or task.exception() is not None:
        tasks.pop(version, None)
