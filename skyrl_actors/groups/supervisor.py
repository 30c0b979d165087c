"""Keeping a group of ranks alive: taken over, started, watched, and made anew when one of them dies or hangs.

Ranks compute together, so they are made anew together. Whoever needs the group awaits `up`.
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
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.groups.actor_group import ActorGroup, GroupBuilder
from skyrl_actors.groups.last_words import last_words, stacks_of
from skyrl_actors.messages.errors import CollectiveFailed, ConfigError, InternalError, UserError
from skyrl_actors.restarts import RestartLimit

log = logging.getLogger(__name__)
T = TypeVar("T")
Say = Callable[[str], None]


class GroupSupervisor:
    """`settle` holds the phase in which ranks may load their weights. `on_up` hears of every group that was made anew."""

    def __init__(
        self,
        builder: GroupBuilder,
        config: RestartConfig,
        say: Say,
        settle: Callable[[], AbstractAsyncContextManager[None]],
        on_up: Callable[[str], None],
    ):
        self.role = builder.role
        self.builder = builder
        self.group: ActorGroup | None = None
        self.restarts = 0
        self.refused = 0  # calls with input that the ranks could not compute with: not finite, too large, of another shape
        self.down: str | None = "starting"
        self._limit = RestartLimit(config)
        self._say = say
        self._settle = settle
        self._on_up = on_up
        self._is_up = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    async def take_over(self) -> bool:
        """The ranks of an earlier controller, if they run and are what the config asks for."""
        running = self.builder.running()
        try:
            if running is None or not await running.adopt(self.builder.specs):
                return False
        except InternalError as error:
            self._say(f"the {self.role} group of an earlier controller can not be taken over: {error}")
            return False
        self._say(f"took over the {self.role} group ({len(running.actors)} rank(s))")
        self._set_up(running)
        return True

    async def start(self) -> None:
        """Make the ranks. Raises InternalError when they can not be started at all."""
        await self.builder.remove(None)
        group = self.builder.make()
        await group.start()
        self._set_up(group)

    def start_later(self) -> None:
        """In the background: what else runs need not wait for it."""
        self.down = "it did not run when the controller started"
        self._restart(self.down)

    def _set_up(self, group: ActorGroup) -> None:
        self.group, self.down = group, None
        self._watching = [asyncio.create_task(self._watch(group, *pair)) for pair in zip(group.names, group.actors, strict=True)]
        self._is_up.set()

    async def _watch(self, group: ActorGroup, name: str, actor: ActorHandle) -> None:
        try:
            await remote.settled(actor.watch.remote())
        except InternalError as error:
            self.lost(group, f"{name}: {error}")

    async def up(self) -> ActorGroup:
        """The running group. Raises InternalError, with the last words of what kept dying, when it was given up."""
        while not self._is_up.is_set():
            if self._restarting is None or self._restarting.done():
                if not self._limit.may_try_again(asyncio.get_running_loop().time()):
                    raise InternalError(f"the {self.role} group keeps dying and was given up: {self.down}")
                self._restart(self.down or "")
            assert self._restarting is not None
            await asyncio.wait([self._restarting])
        assert self.group is not None
        return self.group

    @property
    def name(self) -> str:
        return f"the {self.role} group"

    def remake(self, reason: str) -> None:
        """End its ranks at once and make them anew. They did not die by themselves, so the deaths before do not count on."""
        group = self.group
        if group is None or not self._is_up.is_set():
            return
        self._limit.succeeded()
        for actor in group.actors:
            ray.kill(actor)
        self.lost(group, reason)

    async def calm(self) -> None:
        """Returns when it is not being made anew."""
        while self._restarting is not None and not self._restarting.done():
            await asyncio.wait([self._restarting])

    def worked(self) -> None:
        """Something succeeded: deaths before it no longer count."""
        self._limit.succeeded()

    def lost(self, group: ActorGroup, reason: str) -> None:
        """A rank of this group died or hangs; heard of more than once."""
        if group is not self.group or not self._is_up.is_set():
            return
        self._is_up.clear()
        self.down = reason
        self._say(f"lost the {self.role} group: {reason}")
        self._restart(reason)

    def _restart(self, reason: str) -> None:
        self._restarting = asyncio.create_task(self._make_anew(reason), context=Context())

    async def _make_anew(self, reason: str) -> None:
        words = await last_words(self.group) if self.group else ""
        for task in self._watching:
            task.cancel()
        while (pause_s := self._limit.died(asyncio.get_running_loop().time())) is not None:
            await asyncio.sleep(pause_s)
            try:
                await self.builder.remove(self.group)
                async with self._settle():
                    group = self.builder.make()
                    await group.start()
            except (ConfigError, InternalError) as error:
                reason = self.down = str(error)
                self._say(f"the {self.role} group did not start: {error}")
                continue
            self.restarts += 1
            self._say(f"the {self.role} group runs again")
            self._set_up(group)
            self._on_up(self.role)
            return
        self.down = f"{reason}\n{words}".strip()
        log.error("the %s group is given up: %s", self.role, self.down)

    async def overdue(self, group: ActorGroup | None, error: remote.Overdue) -> None:
        """A call passed its deadline: keep the stacks of the ranks, then make the group anew."""
        if group is None or group is not self.group or not self._is_up.is_set():
            return
        log.error("%s; stacks of the %s group:\n%s", error, self.role, await stacks_of(group))
        self.lost(group, str(error))

    async def guarded(self, work: Awaitable[T]) -> T:
        """Await a call to the group that runs now. A deadline that it passes and a death that it meets are seen to before
        it raises: who asks `up` next gets another group."""
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
        """Watch and restart no more."""
        await remote.ended(*self._watching, self._restarting)

    async def close(self) -> None:
        await self.detach()
        await self.builder.remove(self.group)
