"""Standby training processes, which replace a dead rank within moments.

A standby process has imported torch and loaded the model's code, as most of a rank's start is
imports. Only CPU services use it: on a GPU, the process would hold device memory.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_actors import remote
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.supervision.backoff import pause_after
from skyrl_actors.workers.interface import RankStatus

ASK_TIMEOUT_S = 30.0
LONGEST_PAUSE_S = 300.0
# Several processes are often lost shortly after each other.
REFILL_PAUSE_S = 2.0
CONCURRENCY_GROUPS = {"watch": 1, "status": 2, "files": 1}


def worker_class() -> Any:
    """Return the Ray actor class of training ranks."""
    # The type stubs of Ray lack concurrency_groups.
    make: Any = ray.remote
    return make(concurrency_groups=CONCURRENCY_GROUPS)(TrainWorkerActor)


class Standby:
    """Keep at most `count` idle processes on the node of the slot `bundle`.

    Replacements start in the background after `wait_until_settled` returns, because lost ranks
    restart first.
    """

    def __init__(
        self,
        service: str,
        count: int,
        base_folder: str,
        reserved: PlacementGroup,
        bundle: int,
        environment: dict[str, str],
        epoch: int,
        detached: bool,
        report: Callable[[str], None],
        wait_until_settled: Callable[[], Awaitable[None]],
        busy_timeout_s: float = 900.0,
    ):
        self.bundle = bundle
        # Standby processes of an earlier controller that are ranks now.
        self.strays: list[tuple[ActorHandle[Any], RankStatus]] = []
        self._prefix = f"{service}:standby:"
        self._count = count
        self._base_folder = base_folder
        self._strategy = PlacementGroupSchedulingStrategy(
            reserved, placement_group_bundle_index=bundle
        )
        self._environment = environment
        self._epoch = epoch
        self._options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
        self._report = report
        self._wait_until_settled = wait_until_settled
        # A standby process that became a rank can be busy.
        self._busy_timeout_s = busy_timeout_s
        self._idle: list[ActorHandle[Any]] = []
        self._warming: ActorHandle[Any] | None = None
        self._refilling: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()

    async def find(self) -> None:
        """Find the processes of an earlier controller.

        Idle ones are kept; the others can be ranks of a group.
        """
        for name in remote.names_with(self._prefix):
            actor = remote.named(name)
            if actor is None:
                continue
            try:
                (status,) = await remote.gather(
                    [actor.adopt.remote(self._epoch)], [name], "take over", self._busy_timeout_s
                )
            except InternalError:
                remote.typed_ray.kill(actor)
                continue
            if status.spec is None:
                self._idle.append(actor)
                self._watching.add(asyncio.create_task(self._watch(actor)))
            else:
                self.strays.append((actor, status))

    def take(self, bundle: int) -> ActorHandle[Any] | None:
        """Return a process on the node of that slot, or None.

        The process is idle or still warming up. In the second case it runs its calls once it is
        warm.
        """
        if bundle != self.bundle:
            return None
        if self._idle:
            actor = self._idle.pop()
            self.refill()
        else:
            actor, self._warming = self._warming, None
        return actor

    def refill(self) -> None:
        """Start replacements in the background."""
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        failures = 0
        while len(self._idle) < self._count:
            await asyncio.sleep(pause_after(failures + 1, REFILL_PAUSE_S, LONGEST_PAUSE_S))
            await self._wait_until_settled()
            actor = self._warming = (
                worker_class()
                .options(
                    name=f"{self._prefix}{uuid.uuid4().hex[:8]}",
                    namespace=remote.NAMESPACE,
                    num_cpus=0,
                    scheduling_strategy=self._strategy,
                    runtime_env={"env_vars": self._environment},
                    **self._options,
                )
                .remote(None)
            )
            try:
                await remote.gather(
                    [actor.warm.remote(self._base_folder)],
                    ["standby"],
                    "warm up",
                    10 * ASK_TIMEOUT_S,
                )
            except InternalError as error:
                self._report(f"a standby process did not start: {error}")
                self._warming = None
                remote.typed_ray.kill(actor)
                failures += 1
                continue
            if self._warming is None:
                continue  # `take` returned it
            self._warming = None
            self._idle.append(actor)
            self._watching = {t for t in self._watching if not t.done()} | {
                asyncio.create_task(self._watch(actor))
            }

    async def _watch(self, actor: ActorHandle[Any]) -> None:
        """Remove an idle process when it dies, so that it is not taken."""
        try:
            await remote.settled(actor.watch.remote())
        except InternalError:
            if actor in self._idle:
                self._idle.remove(actor)
                self.refill()

    async def detach(self) -> None:
        """Stop watching and refilling. The processes continue."""
        await remote.ended(*self._watching, self._refilling)

    async def close(self) -> None:
        await self.detach()
        await remote.end_named(remote.names_with(self._prefix))
