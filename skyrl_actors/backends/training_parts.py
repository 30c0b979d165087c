"""Build the standby process and the supervisors of the training groups."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from placement.types import Plan
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.groups.group_builder import GroupBuilder
from skyrl_actors.groups.rank_env import rank_environment, uses_jax
from skyrl_actors.groups.standby import Standby
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.model import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingParts:
    """What all training processes of one start have in common."""

    config: ClusterConfig
    base_folder: Path
    plan: Plan
    reserved: PlacementGroup
    environment: dict[str, str]
    epoch: int
    detached: bool
    report: Callable[[str], None]

    def standby(self, groups_settled: Callable[[], Awaitable[None]]) -> Standby | None:
        """Return the supervisor of the standby process, or None if the service has none."""
        config = self.config
        # A job can wait until a rank has restarted. A service is detached.
        if config.placement.device != "cpu" or not self.detached:
            return None
        return Standby(
            config.name,
            str(self.base_folder),
            self.reserved,
            self.plan.slots_of("policy")[0].index,
            self.environment | rank_environment(config, config.policy),
            self.epoch,
            self.detached,
            config.restart,
            self.report,
            groups_settled,
            uses_jax(config),
            self._kind("policy"),
        )

    def supervisor(
        self,
        role: Role,
        standby: Standby | None,
        loading_phase: Callable[[], AbstractAsyncContextManager[None]],
        on_up: Callable[[str], None],
    ) -> GroupSupervisor:
        """Return the supervisor of a role's ranks, which do not run yet."""
        builder = GroupBuilder(
            role,
            self.config,
            str(self.base_folder),
            self.plan,
            self.reserved,
            self.environment,
            self.epoch,
            self.detached,
            standby,
            self._kind(role),
        )
        return GroupSupervisor(builder, self.config.restart, self.report, loading_phase, on_up)

    def _kind(self, role: Role) -> type[TrainWorkerActor]:
        if role != "policy" or self.config.engine.process == "own":
            return TrainWorkerActor
        from skyrl_actors.engines.rank_with_engine import RankWithEngine

        return RankWithEngine
