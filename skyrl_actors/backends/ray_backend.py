"""The verbs over Ray actors: groups of training ranks, a pool of engines, and the phases they share devices in."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from placement.reserve import cluster_nodes, reserve
from placement.types import DoesNotFit
from skyrl_actors import remote
from skyrl_actors.backends.base import Capabilities
from skyrl_actors.backends.demands import plan_for
from skyrl_actors.backends.environment import actor_environment
from skyrl_actors.colocation.keeper import Keeper, PhaseKeeper, SplitKeeper
from skyrl_actors.colocation.phases import RESIDENT, Move, Part, Phase
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.engines.pool import EnginePool, build_pool
from skyrl_actors.groups.actor_group import ActorGroup, build_group
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.model import AdamParams, LossCall, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import LossOutput, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.transfer.build import build_transfer
from skyrl_actors.transfer.folders import adapter_manifest, full_manifests

STOP_TIMEOUT_S = 20.0
TRAIN_PARTS = {Part.TRAIN_WEIGHTS: "weights", Part.GRADIENTS: "gradients", Part.OPTIMIZER: "optimizer"}


class RayBackend:
    def __init__(self, config: ClusterConfig, base_folder: Path, say: Callable[[str], None]):
        self.config = config
        self.base_folder = base_folder
        self.models: dict[str, ModelSpec] = {}
        self._say = say
        self._transfer = build_transfer(config)
        self._groups: dict[str, ActorGroup] = {}
        self._engines: EnginePool | None = None
        self._reserved: PlacementGroup | None = None
        self._keeper: Keeper = SplitKeeper()
        self._fault: str | None = None
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> Capabilities:
        """Reserve the slots, start groups and engines, and leave the engines asleep where they share devices."""
        plan = plan_for(self.config, cluster_nodes())
        try:
            self._reserved = await reserve(plan, self.config.name, self.config.placement.timeout_s, self._say)
        except DoesNotFit as error:
            raise ConfigError(str(error)) from error
        environment = actor_environment(self.config)
        for role in self._roles:
            self._groups[role] = build_group(role, self.config, str(self.base_folder), plan, self._reserved, environment)
        self._engines = build_pool(self.config, self.base_folder, plan, self._reserved, environment, self._deliver)
        await self._start_parts()
        self._watching = [asyncio.create_task(self._watch(name, actor)) for name, actor in self._parts()]
        if self.config.placement.layout == "colocated":
            self._keeper = PhaseKeeper(self, Phase.TRAIN, self.config.engine.call_timeout_s)
        info = self._groups["policy"].info
        assert info is not None
        return Capabilities(
            self.config.base_model.name, str(self.base_folder), info.vocab_size, info.max_context_tokens,
            min(self.config.engine.max_model_len, info.max_context_tokens), self._roles,
        )  # fmt: skip

    def _parts(self) -> list[tuple[str, ActorHandle]]:
        parts = [pair for group in self._groups.values() for pair in zip(group.names, group.actors, strict=True)]
        return [*parts, *zip(self.engines.names, self.engines.actors, strict=True)]

    async def _watch(self, name: str, actor: ActorHandle) -> None:
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            self._fault = f"{name}: {error}"
            self._say(f"lost {self._fault}")

    def fault(self) -> str | None:
        return f"phase {self._keeper.phase}" if self._keeper.phase == "BROKEN" else self._fault

    async def _start_parts(self) -> None:
        colocated = self.config.placement.layout == "colocated"

        async def engines() -> None:
            self._say(f"starting {len(self.engines.actors)} vLLM engine(s): importing vLLM and loading weights")
            await self.engines.start()
            if colocated:
                await self.engines.sleep()
            self._say("engines ready" + (" and asleep" if colocated else ""))

        async def groups() -> None:
            for group in self._groups.values():
                self._say(f"starting {group.role} group: {len(group.actors)} rank(s) load the base model")
            await asyncio.gather(*(group.start() for group in self._groups.values()))
            self._say("training groups ready")

        if self.config.placement.device == "gpu" and colocated:
            # vLLM wants its memory to be free when it starts, so the engines start first and go to sleep.
            await engines()
            await groups()
        else:
            await asyncio.gather(engines(), groups())

    @property
    def _roles(self) -> tuple[Any, ...]:
        return ("policy", "critic") if self.config.critic else ("policy",)

    @property
    def engines(self) -> EnginePool:
        if self._engines is None:
            raise InternalError("the backend was not started")
        return self._engines

    def _group_of(self, model_id: str) -> ActorGroup:
        return self._groups[self.models[model_id].role]

    async def create_model(self, spec: ModelSpec) -> None:
        group = self._groups[spec.role]
        async with self._keeper.hold(Phase.TRAIN):
            try:
                await group.create_model(spec)
            except BaseException:
                await group.delete_model(spec.model_id)  # some ranks may hold it
                raise
        self.models[spec.model_id] = spec

    async def delete_model(self, model_id: str) -> None:
        async with self._keeper.hold(Phase.TRAIN):
            await self._group_of(model_id).delete_model(model_id)
        del self.models[model_id]

    async def forward_backward(self, model_id: str, columns: Columns, loss: LossCall | None, forward_only: bool) -> LossOutput:
        async with self._keeper.hold(Phase.TRAIN):
            return await self._group_of(model_id).forward_backward(model_id, columns, loss, forward_only)

    async def drop_gradients(self, model_id: str) -> None:
        async with self._keeper.hold(Phase.TRAIN):
            await self._group_of(model_id).drop_gradients(model_id)

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        async with self._keeper.hold(Phase.STEP):
            return await self._group_of(model_id).optim_step(model_id, adam)

    async def save_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        async with self._keeper.hold(Phase.STEP):
            await self._group_of(model_id).save_checkpoint(model_id, folder, with_optimizer)

    async def load_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        async with self._keeper.hold(Phase.STEP):
            await self._group_of(model_id).load_checkpoint(model_id, folder, with_optimizer)

    async def save_for_sampler(self, model_id: str, version: str) -> SamplerWeights:
        async with self._keeper.hold(Phase.TRAIN):
            manifest = await self._transfer.publish(self._group_of(model_id), model_id, version)
        return SamplerWeights(version, (manifest,))

    async def open_sampler(self, folder: str, version: str) -> SamplerWeights:
        path = Path(folder)
        if (path / "adapter_config.json").exists():
            return SamplerWeights(version, (adapter_manifest(path, version),))
        return SamplerWeights(version, full_manifests(path, version))

    async def drop_sampler(self, weights: SamplerWeights) -> None:
        await self.engines.drop(weights)
        exports = str(self.config.transfer.folder)
        for part in weights.parts:
            if part.path.startswith(exports):
                await self._transfer.discard(part, self._groups["policy"], self.engines.actors)

    async def _deliver(self, manifest: WeightManifest, engine: ActorHandle) -> None:
        if manifest.path.startswith(str(self.config.transfer.folder)):
            await self._transfer.deliver(manifest, self._groups["policy"], engine)

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput:
        if self.engines.needs_weights():
            async with self._keeper.hold(Phase.SYNC):
                await self.engines.preload(weights)
        async with self._keeper.hold(Phase.SAMPLE):
            return await self.engines.sample(request_id, prompt, params, weights)

    async def move(self, move: Move, to: Phase) -> None:
        """One move of the phase keeper."""
        if move.part in TRAIN_PARTS:
            direction = "device" if move.action == "load" else "host"
            part: Any = TRAIN_PARTS[move.part]
            await asyncio.gather(*(group.move((part,), direction) for group in self._groups.values()))
        elif move.action == "load":
            await self.engines.wake("weights" if move.part is Part.ENGINE_WEIGHTS else "kv_cache")
        elif move.part is Part.ENGINE_WEIGHTS:
            await self.engines.sleep()  # frees the KV cache in the same breath
        elif Part.ENGINE_WEIGHTS in RESIDENT[to]:
            await self.engines.release_kv()

    async def status(self) -> dict[str, Any]:
        engines = await self.engines.status()
        return {
            "phase": self._keeper.phase,
            "phase_seconds": {name: round(s, 3) for name, s in self._keeper.move_seconds.items()},
            "weight_load_seconds": [round(s, 4) for s in self.engines.load_seconds[-20:]],
            "groups": {
                role: {"ranks": len(g.actors), "models": sum(s.role == role for s in self.models.values())}
                for role, g in self._groups.items()
            },
            "engines": [
                {"version": e.loaded_version, "adapters": len(e.adapters), "asleep": e.asleep, "running": e.running,
                 "rss_bytes": e.rss_bytes}
                for e in engines
            ],
        }  # fmt: skip

    async def close(self) -> None:
        """Stop engines by their own means first: killing them leaves shared memory behind."""
        for task in self._watching:
            task.cancel()
        try:
            if self._engines is not None:
                await self._engines.stop(STOP_TIMEOUT_S)
        except InternalError as error:
            self._say(f"engines did not stop in order: {error}")
        for _, actor in self._parts() if self._engines else []:
            ray.kill(actor)
        if self._reserved is not None:
            try:
                remove_placement_group(self._reserved)
            except RayError as error:
                self._say(f"placement group was not removed: {error}")
