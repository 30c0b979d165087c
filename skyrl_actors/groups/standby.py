"""A training process that waits: torch is imported and the model's code is loaded, so that it can take the place of a dead
rank in a moment. A rank's own start is mostly imports.

Only for CPU services: a process on a GPU would hold memory there.
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
from skyrl_actors.workers.interface import RankStatus

ASK_TIMEOUT_S = 30.0
LONGEST_PAUSE_S = 300.0
REFILL_PAUSE_S = 2.0  # the loss of one process is often followed by the loss of its neighbours
CONCURRENCY_GROUPS = {"watch": 1, "vitals": 2, "files": 1}


def worker_class() -> Any:
    make: Any = ray.remote  # its type stubs do not know concurrency_groups
    return make(concurrency_groups=CONCURRENCY_GROUPS)(TrainWorkerActor)


class Standby:
    """At most `count` idle processes beside the slot `bundle`; taken ones are made anew in the background, when `calm`
    returns: what was lost comes first."""

    def __init__(
        self, service: str, count: int, base_folder: str, reserved: PlacementGroup, bundle: int, environment: dict[str, str],
        epoch: int, detached: bool, say: Callable[[str], None], calm: Callable[[], Awaitable[None]], busy_timeout_s: float = 900.0,
    ):  # fmt: skip
        self.bundle = bundle
        self.strays: list[tuple[ActorHandle, RankStatus]] = []  # of an earlier controller, and no longer idle
        self._prefix = f"{service}:standby:"
        self._count = count
        self._base_folder = base_folder
        self._strategy = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)
        self._environment = environment
        self._epoch = epoch
        self._options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
        self._say = say
        self._calm = calm
        self._busy_timeout_s = busy_timeout_s  # one that became a rank may be at work
        self._idle: list[ActorHandle] = []
        self._warming: ActorHandle | None = None
        self._refilling: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()

    async def find(self) -> None:
        """What an earlier controller left: idle ones are kept, the others may be ranks of a group."""
        for name in remote.names_with(self._prefix):
            actor = remote.named(name)
            if actor is None:
                continue
            try:
                (status,) = await remote.gather([actor.adopt.remote(self._epoch)], [name], "take over", self._busy_timeout_s)
            except InternalError:
                ray.kill(actor)
                continue
            if status.spec is None:
                self._idle.append(actor)
                self._watching.add(asyncio.create_task(self._watch(actor)))
            else:
                self.strays.append((actor, status))

    def take(self, bundle: int) -> ActorHandle | None:
        """A process beside that slot: an idle one, or the one that is on its way there, which does as told when it is warm."""
        if bundle != self.bundle:
            return None
        if self._idle:
            actor = self._idle.pop()
            self.refill()
        else:
            actor, self._warming = self._warming, None
        return actor

    def refill(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill())

    async def _refill(self) -> None:
        pause_s = REFILL_PAUSE_S
        while len(self._idle) < self._count:
            await asyncio.sleep(pause_s)
            await self._calm()
            actor = self._warming = worker_class().options(
                name=f"{self._prefix}{uuid.uuid4().hex[:8]}", namespace=remote.NAMESPACE, num_cpus=0,
                scheduling_strategy=self._strategy, runtime_env={"env_vars": self._environment}, **self._options,
            ).remote(None)  # fmt: skip
            try:
                await remote.gather([actor.warm.remote(self._base_folder)], ["standby"], "warm up", 10 * ASK_TIMEOUT_S)
            except InternalError as error:
                self._say(f"a standby process did not start: {error}")
                self._warming = None
                ray.kill(actor)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if self._warming is None:
                continue  # it was taken
            self._warming = None
            self._idle.append(actor)
            self._watching = {t for t in self._watching if not t.done()} | {asyncio.create_task(self._watch(actor))}

    async def _watch(self, actor: ActorHandle) -> None:
        """One that dies while it waits must not be taken."""
        try:
            await remote.settled(actor.watch.remote())
        except InternalError:
            if actor in self._idle:
                self._idle.remove(actor)
                self.refill()

    async def detach(self) -> None:
        """Watch and refill no more."""
        await remote.ended(*self._watching, self._refilling)

    async def close(self) -> None:
        await self.detach()
        await remote.end_named(remote.names_with(self._prefix))
