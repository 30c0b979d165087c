"""Keep a group of ranks alive: attach, start, watch, and restart after a death or a hang.

Ranks compute together, so they restart together. Callers that need the group await `up`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import TypeVar

import ray
from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.backoff import RestartLimit
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.groups.actor_group import ActorGroup, GroupBuilder
from skyrl_actors.groups.log_tail import log_tail, stacks_of
from skyrl_actors.messages.errors import CollectiveFailed, ConfigError, InternalError, UserError

log = logging.getLogger(__name__)
T = TypeVar("T")
Say = Callable[[str], None]


class GroupSupervisor:
    """Supervise the ranks of one role.

    `loading_phase` holds the phase in which ranks can load their weights. `on_up` is called with
    the role after each restart of the group.
    """

    def __init__(
        self,
        builder: GroupBuilder,
        config: RestartConfig,
        report: Say,
        loading_phase: Callable[[], AbstractAsyncContextManager[None]],
        on_up: Callable[[str], None],
    ):
        self.role = builder.role
        self.builder = builder
        self.group: ActorGroup | None = None
        self.restarts = 0
        # Calls with invalid input: not finite, too large, or of a wrong shape.
        self.refused = 0
        self.down: str | None = "starting"
        self._limit = RestartLimit(config)
        self._report = report
        self._loading_phase = loading_phase
        self._on_up = on_up
        self._is_up = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    async def take_over(self) -> bool:
        """Attach to the ranks of an earlier controller if they run with the configured specs."""
        running = self.builder.running()
        try:
            if running is None or not await running.adopt(self.builder.specs):
                return False
        except InternalError as error:
            self._report(
                f"cannot attach to the {self.role} group of an earlier controller: {error}"
            )
            return False
        self._report(f"took over the {self.role} group ({len(running.actors)} rank(s))")
        self._set_up(running)
        return True

    async def start(self) -> None:
        """Create and start the ranks. Raises InternalError when they cannot start."""
        await self.builder.remove(None)
        group = self.builder.make()
        await group.start()
        self._set_up(group)

    def start_later(self) -> None:
        """Start the ranks in the background, so that other parts do not wait for them."""
        self.down = "it did not run when the controller started"
        self._restart(self.down)

    def _set_up(self, group: ActorGroup) -> None:
        self.group, self.down = group, None
        self._watching = [
            asyncio.create_task(self._watch(group, *pair))
            for pair in zip(group.names, group.actors, strict=True)
        ]
        self._is_up.set()

    async def _watch(self, group: ActorGroup, name: str, actor: ActorHandle) -> None:
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            self.lost(group, f"{name}: {error}")

    async def up(self) -> ActorGroup:
        """Return the running group, after a restart if necessary.

        Raises InternalError with the log tail when the restarts were given up.
        """
        while not self._is_up.is_set():
            if self._restarting is None or self._restarting.done():
                if not self._limit.may_try_again(asyncio.get_running_loop().time()):
                    raise InternalError(
                        f"the {self.role} group keeps dying and was given up: {self.down}"
                    )
                self._restart(self.down or "")
            assert self._restarting is not None
            await asyncio.wait([self._restarting])
        assert self.group is not None
        return self.group

    @property
    def name(self) -> str:
        return f"the {self.role} group"

    def restart_now(self, reason: str) -> None:
        """Kill the ranks and restart the group.

        The ranks did not die by themselves, so this resets the count of deaths.
        """
        group = self.group
        if group is None or not self._is_up.is_set():
            return
        self._limit.succeeded()
        for actor in group.actors:
            ray.kill(actor)
        self.lost(group, reason)

    async def wait_until_settled(self) -> None:
        """Wait until no restart is in progress."""
        while self._restarting is not None and not self._restarting.done():
            await asyncio.wait([self._restarting])

    def worked(self) -> None:
        """Reset the count of deaths after a success."""
        self._limit.succeeded()

    def lost(self, group: ActorGroup, reason: str) -> None:
        """Restart the group after a rank died or hung. Repeated reports of one loss are ignored."""
        if group is not self.group or not self._is_up.is_set():
            return
        self._is_up.clear()
        self.down = reason
        self._report(f"lost the {self.role} group: {reason}")
        self._restart(reason)

    def _restart(self, reason: str) -> None:
        self._restarting = asyncio.create_task(self._restart_until_up(reason), context=Context())

    async def _restart_until_up(self, reason: str) -> None:
        tail = await log_tail(self.group) if self.group else ""
        for task in self._watching:
            task.cancel()
        while (pause_s := self._limit.died(asyncio.get_running_loop().time())) is not None:
            await asyncio.sleep(pause_s)
            try:
                await self.builder.remove(self.group)
                async with self._loading_phase():
                    group = self.builder.make()
                    await group.start()
            except (ConfigError, InternalError) as error:
                reason = self.down = str(error)
                self._report(f"the {self.role} group did not start: {error}")
                continue
            self.restarts += 1
            self._report(f"the {self.role} group runs again")
            self._set_up(group)
            self._on_up(self.role)
            return
        self.down = f"{reason}\n{tail}".strip()
        log.error("the %s group is given up: %s", self.role, self.down)

    async def overdue(self, group: ActorGroup | None, error: remote.Overdue) -> None:
        """Handle a call that passed its deadline: log the ranks' stacks, then restart the group."""
        if group is None or group is not self.group or not self._is_up.is_set():
            return
        log.error("%s; stacks of the %s group:\n%s", error, self.role, await stacks_of(group))
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
        await remote.ended(*self._watching, self._restarting)

    async def close(self) -> None:
        """Stop watching, and end the ranks."""
        await self.detach()
        await self.builder.remove(self.group)
