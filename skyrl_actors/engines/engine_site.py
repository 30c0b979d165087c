"""Where an engine runs: in an actor of its own, or in the process of a rank."""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_actors import remote
from skyrl_actors.engines.interface import EngineSpec
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import PartDown

Handle = ActorHandle[Any]


class EngineSite(Protocol):
    """Create, find and end the process of one engine."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def actor_names(self) -> list[str]:
        """The names of actors that only this engine has."""
        ...

    async def available(self) -> None:
        """Wait until `make` can be called. Raises InternalError if it never can."""
        ...

    async def make(self) -> Handle: ...

    def find(self, actors: remote.Actors) -> Handle | None:
        """Return the engine of an earlier controller, or None."""
        ...

    def kill(self, actor: Handle) -> None:
        """Kill the process."""
        ...

    def failed(self, reason: str) -> None:
        """Learn that an engine did not start again, perhaps because its process is broken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSite:
    """An engine in an actor of its own, and the options of that actor."""

    spec: EngineSpec
    name: str
    reserved: PlacementGroup
    bundle: int
    share: float
    on_gpu: bool  # the actor itself takes a share of one GPU; if several, its slots hold them
    environment: dict[str, str]
    detached: bool
    over_nodes: bool = False

    @property
    def actor_names(self) -> list[str]:
        return [self.name]

    async def available(self) -> None: ...

    async def make(self) -> Handle:
        from skyrl_actors.engines.actor import EngineActor

        options: dict[str, Any] = {"lifetime": "detached"} if self.detached else {}
        actor_class = ray.remote(EngineActor).options(
            name=self.name,
            namespace=remote.NAMESPACE,
            num_cpus=self.share,
            num_gpus=self.share if self.on_gpu else 0,
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.reserved,
                placement_group_bundle_index=self.bundle,
                placement_group_capture_child_tasks=self.over_nodes,
            ),
            runtime_env={"env_vars": self.environment},
            **options,
        )
        return await remote.make_named(actor_class, self.spec)

    def find(self, actors: remote.Actors) -> Handle | None:
        return actors.get(self.name)

    def kill(self, actor: Handle) -> None:
        remote.typed_ray.kill(actor)

    def failed(self, reason: str) -> None:
        """Do nothing: each start has a process of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSite:
    """An engine in the process of a policy rank, whose base model it shares.

    It lives and dies with the rank: a group that restarts brings the engine down too, and an engine
    that must be killed takes the group with it.
    """

    spec: EngineSpec
    rank: int
    policy: GroupSupervisor
    timeout_s: float  # for the rank to end its call, load its base and end an earlier engine

    @property
    def actor_names(self) -> list[str]:
        return []

    async def available(self) -> None:
        await self.policy.up()

    async def make(self) -> Handle:
        group = self.policy.group
        # The caller can hold a phase that a restarting group needs, so this does not wait for it.
        if group is None or self.policy.down is not None:
            raise PartDown(f"{self.policy.name} is down: {self.policy.down}")
        rank, name = group.actors[self.rank], group.names[self.rank]
        hosting = [rank.host.remote(self.spec)]
        await remote.gather(hosting, [name], "host an engine", self.timeout_s)
        return _in(rank)

    def find(self, actors: remote.Actors) -> Handle | None:
        group = self.policy.group
        return _in(group.actors[self.rank]) if group else None

    def kill(self, actor: Handle) -> None:
        remote.typed_ray.kill(cast(Any, actor).rank)

    def failed(self, reason: str) -> None:
        self.policy.restart_now(f"{self.spec.name}, which it hosts, did not start: {reason}")


def _in(rank: Handle) -> Handle:
    from skyrl_actors.engines.rank_with_engine import EngineInRank

    return cast(Handle, EngineInRank(rank))
