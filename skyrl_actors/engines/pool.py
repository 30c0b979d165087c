"""Many engine actors as one: routing, which version each holds, sleep and wake.

Every engine has a gate keyed by the version of its full weights: samples of one version share it, and loading another
version waits for them. LoRA samples need the base's weights plus their adapter.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.types import Plan
from skyrl_actors import remote
from skyrl_actors.colocation.gate import Gate
from skyrl_actors.config.cluster import ClusterConfig, EngineConfig
from skyrl_actors.engines.interface import BASE_VERSION, EngineSpec, EngineStatus
from skyrl_actors.engines.routing import EngineLoad, choose
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.transfer.folders import full_manifests

Deliver = Callable[[WeightManifest, ActorHandle], Awaitable[None]]
DROPPED = ""  # state of an engine whose weights were dropped: no version


class EnginePool:
    def __init__(self, config: EngineConfig, actors: list[ActorHandle], base_folder: Path, deliver: Deliver):
        self.config = config
        self.actors = actors
        self.load_seconds: list[float] = []
        self._base_folder = base_folder
        self._deliver = deliver
        self._full: dict[str, tuple[WeightManifest, ...]] = {}
        self._delivered: list[dict[str, asyncio.Task[None]]] = [{} for _ in actors]
        self._gates = [Gate[str](BASE_VERSION, self._loader(i), after_failure=DROPPED) for i in range(len(actors))]

    @property
    def names(self) -> list[str]:
        return [f"engine[{i}]" for i in range(len(self.actors))]

    async def start(self) -> None:
        refs = [actor.start.remote() for actor in self.actors]
        await remote.gather(refs, self.names, "engine start", self.config.start_timeout_s)

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput:
        wanted = self._register(weights)
        loads = [EngineLoad(g.num_holders, g.num_waiting, g.state == wanted) for g in self._gates]
        index = choose(loads)
        async with self._gates[index].hold(wanted):
            if weights.adapter:
                await self._delivered_to(index, weights.adapter)
            ref = self.actors[index].sample.remote(request_id, prompt, params, weights.adapter, weights.version)
            try:
                (output,) = await remote.gather([ref], [self.names[index]], "sample", self.config.call_timeout_s)
            except asyncio.CancelledError:
                ray.cancel(ref)
                raise
            return output

    async def preload(self, weights: SamplerWeights) -> None:
        """Load full weights into the engines that lost theirs, before the KV cache is given memory."""
        wanted = self._register(weights)
        for gate in self._gates:
            if gate.state == DROPPED:
                async with gate.hold(wanted):
                    pass

    def needs_weights(self) -> bool:
        return any(gate.state == DROPPED for gate in self._gates)

    async def sleep(self) -> None:
        """Level 2 (weights dropped) where the next full fine-tune sends them again, level 1 where the base stays."""
        levels = []
        for gate in self._gates:
            auto = 1 if gate.state == BASE_VERSION else 2
            levels.append(auto if self.config.sleep_level == "auto" else int(self.config.sleep_level))
        await self._all("sleep", [(level,) for level in levels])
        for gate, level in zip(self._gates, levels, strict=True):
            if level == 2:
                gate.forget(DROPPED)

    async def release_kv(self) -> None:
        """Free the KV cache and keep the weights."""
        await self._all("sleep", [(1,)] * len(self.actors))
        await self.wake("weights")

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        await self._all("wake", [(tag,)] * len(self.actors))

    async def drop(self, weights: SamplerWeights) -> None:
        """Forget a version; the caller frees its files."""
        self._full.pop(weights.version, None)
        for delivered in self._delivered:
            delivered.pop(weights.version, None)
        if weights.adapter:
            await self._all("drop_adapters", [((weights.version,),)] * len(self.actors))

    async def status(self) -> list[EngineStatus]:
        return await self._all("status", [()] * len(self.actors))

    async def stop(self, timeout_s: float) -> None:
        await remote.gather([actor.stop.remote() for actor in self.actors], self.names, "engine stop", timeout_s)

    def _register(self, weights: SamplerWeights) -> str:
        if full_version(weights) != BASE_VERSION:
            self._full[weights.version] = weights.parts
        return full_version(weights)

    def _loader(self, index: int) -> Callable[[str, str], Awaitable[None]]:
        async def load(old: str, version: str) -> None:
            started = time.perf_counter()
            if version == BASE_VERSION:
                parts = full_manifests(self._base_folder, BASE_VERSION)
            else:
                parts = self._full[version]
                for part in parts:
                    await self._delivered_to(index, part)
            ref = self.actors[index].load_full.remote(version, parts)
            await remote.gather([ref], [self.names[index]], f"load weights {version}", self.config.call_timeout_s)
            self.load_seconds.append(time.perf_counter() - started)

        return load

    async def _delivered_to(self, index: int, manifest: WeightManifest) -> None:
        """Many samples of a new version start together; one delivery serves them all."""
        deliveries = self._delivered[index]
        if manifest.version not in deliveries:
            deliveries[manifest.version] = asyncio.ensure_future(self._deliver(manifest, self.actors[index]))
        try:
            await asyncio.shield(deliveries[manifest.version])
        except Exception:
            deliveries.pop(manifest.version, None)
            raise

    async def _all(self, method: str, args: list[tuple]) -> list:
        refs = [getattr(actor, method).remote(*share) for actor, share in zip(self.actors, args, strict=True)]
        return await remote.gather(refs, self.names, method, self.config.call_timeout_s)


def full_version(weights: SamplerWeights) -> str:
    """The version of full weights an engine must hold: an adapter works over the base."""
    return BASE_VERSION if weights.adapter or not weights.parts else weights.version


def build_pool(
    config: ClusterConfig,
    base_folder: Path,
    plan: Plan,
    reserved: PlacementGroup,
    environment: dict[str, str],
    deliver: Deliver,
) -> EnginePool:
    from skyrl_actors.engines.actor import EngineActor

    engine = config.engine
    share = config.placement.colocated_share if config.placement.layout == "colocated" else 1.0
    actors = []
    for index, slot in enumerate(plan.slots_of("engine")):
        spec = EngineSpec(
            f"engine[{index}]", str(base_folder), config.placement.device, engine.dtype, engine.max_model_len,
            engine.max_num_seqs, engine.max_num_batched_tokens, engine.kv_cache_bytes, engine.max_loras,
            config.lora.max_rank, config.lora.max_adapters * 4, engine.max_logprobs, engine.enforce_eager, engine.call_timeout_s,
        )  # fmt: skip
        actor_class = ray.remote(EngineActor).options(
            name=f"{config.name}:engine:{index}",
            num_cpus=share,
            num_gpus=share if plan.device == "GPU" else 0,
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=slot.index),
            runtime_env={"env_vars": {**environment, "OMP_NUM_THREADS": str(engine.num_threads)}},
        )
        actors.append(actor_class.remote(spec))
    return EnginePool(engine, actors, base_folder, deliver)
