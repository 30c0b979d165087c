"""Create, find and end the actors of a training group."""

from typing import Any

from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.types import Plan
from skyrl_actors import remote
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.groups.actor_group import ActorGroup, names_of
from skyrl_actors.groups.fan_out import FanOut, relay_in, tree_to
from skyrl_actors.groups.rank_env import rank_environment
from skyrl_actors.groups.standby import Standby, worker_class
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.model import Role
from skyrl_actors.workers.interface import WorkerSpec


class GroupBuilder:
    """Create the actors of a role in the slots of the plan, always under the same names."""

    def __init__(
        self,
        role: Role,
        config: ClusterConfig,
        base_folder: str,
        plan: Plan,
        reserved: PlacementGroup,
        environment: dict[str, str],
        epoch: int,
        detached: bool,
        standby: Standby | None = None,
        kind: type[TrainWorkerActor] = TrainWorkerActor,
    ):
        group_config = config.policy if role == "policy" else config.critic
        if group_config is None:
            raise ConfigError(f"the config has no {role} group")
        self.role: Role = role
        self.config, self.epoch = group_config, epoch
        self.slots = plan.slots_of(role)
        self.names = [f"{config.name}:{role}:{rank}" for rank in range(len(self.slots))]
        full_strategy = (
            group_config.full_strategy_on(config.placement.device)
            if config.lora.max_full_models
            else ReplicaStrategy()
        )
        self.specs = [
            WorkerSpec(
                role=role,
                rank=rank,
                world_size=group_config.num_ranks,
                base_folder=base_folder,
                dtype=group_config.dtype,
                device=config.placement.device,
                num_threads=group_config.num_threads,
                microbatch_tokens=group_config.microbatch_tokens,
                collective_timeout_s=config.restart.collective_timeout_s,
                strategy=group_config.strategy,
                full_strategy=full_strategy,
                activations=group_config.activations,
                sequence_parallel=group_config.sequence_parallel,
                score_uncounted=group_config.score_uncounted,
                preload=detached,  # a job loads only what its models need
                export_dtype=config.engine.dtype,
                max_adapters=config.lora.max_adapters,
                max_rank=config.lora.max_rank,
                router_replay=config.router_replay and role == "policy",
                hosts_engine=config.engine.process == "policy" and role == "policy",
                environment=tuple(sorted(config.environment.items())),
            )
            for rank in range(len(self.slots))
        ]
        self._share = next(
            hold[2] for slot in self.slots[:1] for hold in slot.holds if hold[0] == role
        )
        self._standby, self._class = standby, worker_class(kind)
        self._on_gpu = plan.device == "GPU"
        # A detached actor outlives its controller, and the next controller attaches to it.
        self._lifetime = {"lifetime": "detached"} if detached else {}
        self._reserved, self._restart = reserved, config.restart
        self._environment = environment | rank_environment(config, group_config)

    def running(self, living: remote.Actors) -> ActorGroup | None:
        """Return the ranks of an earlier controller if all of them live."""
        promoted = {
            status.spec: actor for actor, status in (self._standby.strays if self._standby else ())
        }
        actors = [
            promoted.get(spec) or living.get(name)
            for name, spec in zip(self.names, self.specs, strict=True)
        ]
        return self._group([actor for actor in actors if actor]) if all(actors) else None

    async def make(self) -> ActorGroup:
        """Create the actor of every rank, from standby processes where possible.

        The ranks start when `start` is awaited. Raises InternalError while a name is in use.
        """
        actors: list[ActorHandle[Any]] = []
        for name, slot, spec in zip(self.names, self.slots, self.specs, strict=True):
            actor = self._standby.take(slot.index) if self._standby else None
            if actor is not None:
                actor.become.remote(spec)
            else:
                actor = await self._new(name, slot.index, spec)
            actors.append(actor)
        return self._group(actors)

    async def _new(self, name: str, bundle: int, spec: WorkerSpec) -> ActorHandle[Any]:
        actor_class = self._class.options(
            name=name,
            namespace=remote.NAMESPACE,
            num_cpus=self._share,
            num_gpus=self._share if self._on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._reserved, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": self._environment},
            **self._lifetime,
        )
        return await remote.make_named(actor_class, spec)

    def _group(self, actors: list[ActorHandle[Any]]) -> ActorGroup:
        relay = relay_in(self._reserved, [slot.index for slot in self.slots])
        fan_out = FanOut(names_of(self.role, len(actors)), *tree_to(actors, relay))
        return ActorGroup(self.role, self.config, actors, self.epoch, self._restart, fan_out)

    async def remove(self, group: ActorGroup | None) -> None:
        """End the ranks of this role and wait until their names are free.

        This includes ranks that an earlier controller created.
        """
        for actor in (*group.actors, *group.fan_out.relays) if group else ():
            remote.typed_ray.kill(actor)
        if self._standby is not None:
            for actor, status in self._standby.strays:
                if status.spec is not None and status.spec.role == self.role:
                    remote.typed_ray.kill(actor)
            self._standby.strays = [
                s
                for s in self._standby.strays
                if s[1].spec is not None and s[1].spec.role != self.role
            ]
        await remote.end_named(self.names)
