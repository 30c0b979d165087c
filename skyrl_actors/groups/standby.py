"""A standby training process, which replaces a dead rank within moments.

It has imported torch and loaded the model's code, as most of a rank's start is imports. Only CPU
services use it: on a GPU, the process would hold device memory.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_actors import remote
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.supervision.supervisor import Supervisor
from skyrl_actors.workers.interface import RankStatus

WARM_TIMEOUT_S = 300.0
# Several processes are often lost shortly after each other.
PAUSE_S = 2.0


def worker_class(kind: type[TrainWorkerActor]) -> Any:
    """Return the Ray actor class of training ranks."""
    # The type stubs of Ray lack concurrency_groups.
    make: Any = ray.remote
    return make(concurrency_groups=kind.concurrency_groups)(kind)


class Standby(Supervisor):
    """Supervise one idle process on the node of the slot `bundle`. HEALTHY: it can become a rank.

    Its successor starts in the background after `groups_settled` returns, because lost ranks
    restart first.
    """

    def __init__(
        self,
        service: str,
        base_folder: str,
        reserved: PlacementGroup,
        bundle: int,
        environment: dict[str, str],
        epoch: int,
        detached: bool,
        restart: RestartConfig,
        report: Callable[[str], None],
        groups_settled: Callable[[], Awaitable[None]],
        with_jax: bool = False,
        kind: type[TrainWorkerActor] = TrainWorkerActor,
    ):
        super().__init__("the standby process", restart, report)
        self.bundle = bundle
        self.actor: ActorHandle[Any] | None = None  # idle or warming up
        # Standby processes of an earlier controller that are ranks now.
        self.strays: list[tuple[ActorHandle[Any], RankStatus]] = []
        self._prefix = f"{service}:standby:"
        self._base_folder = base_folder
        self._strategy = PlacementGroupSchedulingStrategy(
            reserved, placement_group_bundle_index=bundle
        )
        self._environment = environment
        # One of another class or environment cannot become a rank of this config.
        made_of = [kind.__name__, sorted(environment.items())]
        digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:8]
        self._own_prefix = f"{self._prefix}{digest}-"
        self._epoch = epoch
        self._options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
        self._groups_settled = groups_settled
        self._with_jax, self._class = with_jax, worker_class(kind)
        self._watching: asyncio.Task[None] | None = None

    async def take_over(self, actors: remote.Actors) -> bool:
        """Find the processes of an earlier controller; return whether an idle one runs.

        The others can be ranks of a group.
        """
        for name, actor in actors.items():
            if not name.startswith(self._prefix):
                continue
            try:
                # A standby process that became a rank can be busy.
                (status,) = await remote.gather(
                    [actor.adopt.remote(self._epoch)],
                    [name],
                    "take over",
                    self.restart.call_timeout_s,
                )
            except InternalError:
                remote.typed_ray.kill(actor)
                continue
            if not status.is_of_this_version:
                remote.typed_ray.kill(actor)
            elif status.spec is not None:
                self.strays.append((actor, status))
            elif self.actor is None and name.startswith(self._own_prefix):
                self._set_up(actor)
            else:
                remote.typed_ray.kill(actor)
        return self.actor is not None

    async def start(self) -> None:
        """Start a process and wait until it is warm. Raises InternalError when it cannot start.

        A process that is taken while it warms up is replaced.
        """
        while True:
            await asyncio.sleep(PAUSE_S)
            await self._groups_settled()
            actor = self.actor = await remote.ask(self._new)
            try:
                await remote.gather(
                    [actor.warm.remote(self._base_folder, self._with_jax)],
                    ["standby"],
                    "warm up",
                    WARM_TIMEOUT_S,
                )
            except InternalError:
                if self.actor is actor:
                    self.actor = None
                remote.typed_ray.kill(actor)
                raise
            if self.actor is actor:
                return self._set_up(actor)

    def _new(self) -> ActorHandle[Any]:
        return self._class.options(
            name=f"{self._own_prefix}{uuid.uuid4().hex[:8]}",
            namespace=remote.NAMESPACE,
            num_cpus=0,
            scheduling_strategy=self._strategy,
            runtime_env={"env_vars": self._environment},
            **self._options,
        ).remote(None)

    def _set_up(self, actor: ActorHandle[Any]) -> None:
        self.actor = actor
        self._watching = asyncio.create_task(self._watch(actor))
        self.worked()
        self._step("started")
        self._step("ready")

    async def _watch(self, actor: ActorHandle[Any]) -> None:
        """Replace an idle process that dies."""
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            if actor is self.actor:
                self.actor = None
                self.died(str(error))

    def take(self, bundle: int) -> ActorHandle[Any] | None:
        """Return a process on the node of that slot, or None.

        The process is idle or still warming up. In the second case it runs its calls once it is
        warm.
        """
        if bundle != self.bundle:
            return None
        actor, self.actor = self.actor, None
        if self.health == "HEALTHY":
            if self._watching is not None:
                self._watching.cancel()  # its group watches it from now on
            self.reason = "it became a rank"
            self._step("died")
        self.restart_if_dead()
        return actor

    async def _come_back(self) -> None:
        self._step("again")
        await self.start()

    async def detach(self) -> None:
        """Stop watching and restarts. The process continues."""
        await super().detach()
        await remote.ended(self._watching)

    async def close(self) -> None:
        """Stop supervision and end the process."""
        await self.detach()
        await remote.end_all(self._prefix)
