"""Supervise the ranks of one role.

Ranks compute together, so they restart together. Callers that need the group await `up`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.groups.group_builder import GroupBuilder
from skyrl_actors.groups.log_tail import log_tail, stacks_of
from skyrl_actors.messages.errors import CollectiveFailed, InternalError, UserError
from skyrl_actors.supervision.supervisor import Supervisor

log = logging.getLogger(__name__)
T = TypeVar("T")
PROGRESS_S = 10.0


class GroupSupervisor(Supervisor):
    """Supervise the ranks of one role.

    `loading_phase` holds the phase in which ranks can load their weights. `on_up` is called with
    the role after each restart of the group.
    """

    def __init__(
        self,
        builder: GroupBuilder,
        config: RestartConfig,
        report: Callable[[str], None],
        loading_phase: Callable[[], AbstractAsyncContextManager[None]],
        on_up: Callable[[str], None],
    ):
        super().__init__(f"the {builder.role} group", config, report)
        self.role = builder.role
        self.builder = builder
        self.group: ActorGroup | None = None
        # Calls with invalid input: not finite, too large, or of a wrong shape.
        self.refused = 0
        self._loading_phase = loading_phase
        self.on_restarted = lambda: on_up(builder.role)
        self._watching: list[asyncio.Task[None]] = []

    async def take_over(self, actors: remote.Actors) -> bool:
        """Attach to the ranks of an earlier controller if they run with the configured specs."""
        running = self.builder.running(actors)
        try:
            if running is None or not await running.adopt(self.builder.specs):
                return False
        except InternalError as error:
            self._report(f"cannot attach to {self.name} of an earlier controller: {error}")
            return False
        self._report(f"took over {self.name} ({len(running.actors)} rank(s))")
        self._set_up(running)
        return True

    async def start(self) -> None:
        """Create and start the ranks. Raises InternalError when they cannot start."""
        await self.builder.remove(None)
        await self._make()

    async def _make(self) -> None:
        group = await self.builder.make()
        progress = asyncio.create_task(self._report_programs(group))
        try:
            await group.start()
        finally:
            await remote.ended(progress)
        self._set_up(group)

    async def _report_programs(self, group: ActorGroup) -> None:
        """Report at intervals how many programs the ranks have compiled."""
        reported: dict[str, str] = {}
        while True:
            await asyncio.sleep(PROGRESS_S)
            try:
                usages = await group.usage()
            except InternalError:
                continue  # `start` raises what failed
            for name, usage in zip(group.names, usages, strict=True):
                text = usage.paths.get("programs", "")
                if text and text != reported.get(name):
                    self._report(f"{name} compiles programs: {text}")
                    reported[name] = text

    def _set_up(self, group: ActorGroup) -> None:
        self.group = group
        self._watching = [
            asyncio.create_task(self._watch(group, *pair))
            for pair in zip(group.names, group.actors, strict=True)
        ]
        self._step("started")
        self._step("ready")

    async def _watch(self, group: ActorGroup, name: str, actor: ActorHandle[Any]) -> None:
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            self.lost(group, f"{name}: {error}")

    async def up(self) -> ActorGroup:
        """Return the running group, after a restart if necessary.

        Raises InternalError with the log tail when the restarts were given up.
        """
        await self.until_healthy()
        assert self.group is not None
        return self.group

    def restart_now(self, reason: str) -> None:
        """Kill the ranks and restart the group; this does not count as a death."""
        if self.group is None or self.health != "HEALTHY":
            return
        for actor in self.group.actors:
            remote.typed_ray.kill(actor)
        super().restart_now(reason)

    def lost(self, group: ActorGroup, reason: str) -> None:
        """Restart the group after a rank died or hung. Reports of earlier groups are ignored."""
        if group is self.group and self.health == "HEALTHY":
            self.died(reason)

    async def log_tail(self) -> str:
        return await log_tail(self.group) if self.group else ""

    async def _come_back(self) -> None:
        for task in self._watching:
            task.cancel()
        await self.builder.remove(self.group)
        self._step("again")
        async with self._loading_phase():
            await self._make()
        self._report(f"{self.name} runs again")

    async def overdue(self, group: ActorGroup | None, error: remote.Overdue) -> None:
        """Handle a call that passed its deadline: log the ranks' stacks, then restart the group."""
        if group is None or group is not self.group or self.health != "HEALTHY":
            return
        log.error("%s; stacks of %s:\n%s", error, self.name, await stacks_of(group))
        self.lost(group, str(error))

    async def guarded(self, work: Awaitable[T]) -> T:
        """Await a call to the running group, and start a restart when a rank hangs or dies.

        The restart begins before the error is raised, so the next `up` returns a new group.
        """
        group = self.group
        try:
            result = await work
        except remote.Overdue as error:
            await self.overdue(group, error)
            raise
        except (CollectiveFailed, remote.ActorDied) as error:
            if group is not None:
                self.lost(group, str(error))
            raise
        except UserError:
            self.refused += 1
            raise
        self.worked()
        return result

    async def detach(self) -> None:
        """Stop watching and restarting. The ranks continue."""
        await super().detach()
        await remote.ended(*self._watching)

    async def close(self) -> None:
        """Stop watching, and end the ranks."""
        await self.detach()
        await self.builder.remove(self.group)
