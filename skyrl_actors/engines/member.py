"""What engines of a pool have in common, whoever runs them: health, restarts, and which weights each holds."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context
from typing import Any

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.colocation.gate import Gate
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.engines.health import Event, Health, after
from skyrl_actors.engines.interface import BASE_VERSION, EngineStatus
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.weights import WeightStream
from skyrl_actors.restarts import RestartLimit
from skyrl_actors.transfer.base import EnginePlace


class Member(ABC):
    """`joining` holds the phase in which an engine may be awake; `on_change` hears whenever its health changes."""

    gate: Gate[str]  # by the version of its full weights
    actor: ActorHandle | None = None  # of one that this service runs
    place = EnginePlace(1)
    ours = True  # this service starts it, moves its memory and gives it full weights

    def __init__(self, name: str, restart: RestartConfig, say: Callable[[str], None]):
        self.name = name
        self.health: Health = "STARTING"
        self.reason: str | None = None
        self.restarts = 0
        self.delivered: dict[str, asyncio.Task[WeightStream | None]] = {}
        self.agreed: dict[str, asyncio.Task[None]] = {}  # versions of which it gave the trainer's logprobs
        self.wanted = BASE_VERSION  # the full weights that were asked for last
        self.moving = asyncio.Lock()  # it goes to sleep, or is given weights
        self.joining: Callable[[], AbstractAsyncContextManager[None]] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._say = say
        self.restart = restart
        self._limit = RestartLimit(restart)
        self._restarting: asyncio.Task[None] | None = None
        self._left = False  # it is watched no more: its end is no loss

    @abstractmethod
    async def take_over(self) -> bool:
        """Whether it runs already, as an earlier controller left it."""

    @abstractmethod
    async def start(self) -> None:
        """It is HEALTHY, with the base's weights, when this returns."""

    @abstractmethod
    async def ask(self, method: str, *arguments: Any) -> Any:
        """One call. When the engine is gone or does not answer in time it is made anew, and StateLost is raised."""

    @abstractmethod
    async def status(self) -> EngineStatus: ...

    @abstractmethod
    async def _come_back(self) -> None:
        """Make it anew and HEALTHY. Raises InternalError when this try failed."""

    @abstractmethod
    async def detach(self) -> None:
        """Watch and restart no more."""

    @abstractmethod
    async def close(self) -> None: ...

    def last_words(self) -> str:
        """What it said before it died."""
        return ""

    def _step(self, event: Event) -> None:
        self.health = after(self.health, event)
        self.on_change()

    def start_later(self) -> None:
        """In the background: what else runs need not wait for it."""
        self.reason = "it did not run when the controller started"
        self._step("died")
        self.revive()

    def worked(self) -> None:
        self._limit.succeeded()

    def died(self, reason: str) -> None:
        if self.health == "DEAD":
            return
        self.reason = reason
        self._step("died")
        if not self._left:
            self._say(f"lost {self.name}: {reason}")
            self.revive()

    def remake(self, reason: str) -> None:
        """End it at once and make it anew. It did not die by itself, so the deaths before do not count on."""
        self._limit.succeeded()
        self.died(reason)

    def revive(self) -> None:
        """Begin to make a dead engine anew, unless that is under way or was given up lately."""
        if self._left or self.health != "DEAD" or (self._restarting is not None and not self._restarting.done()):
            return
        if self._limit.may_try_again(asyncio.get_running_loop().time()):
            self._restarting = asyncio.create_task(self._make_anew(), context=Context())

    @property
    def given_up(self) -> bool:
        return self.health == "DEAD" and (self._restarting is None or self._restarting.done())

    async def _make_anew(self) -> None:
        words, loop = self.last_words(), asyncio.get_running_loop()
        try:
            while (pause_s := self._limit.died(loop.time())) is not None:
                await asyncio.sleep(pause_s)
                try:
                    await self._come_back()
                    self.restarts += 1
                    return
                except (ConfigError, InternalError) as error:
                    self.reason = str(error)
                    self._say(f"{self.name} did not start: {error}")
                    if self.health != "DEAD":
                        self._step("died")
            self.reason = f"{self.reason}\n{words}".strip()
        finally:
            # Who waits for an engine must hear that this one was given up, which is so when this task has ended.
            loop.call_soon(self.on_change)

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; what runs may end, at most `timeout_s` long."""
        if self.health == "HEALTHY":
            self._step("drain")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.gate.idle(), timeout_s)

    async def _no_more_restarts(self) -> None:
        self._left = True
        await remote.ended(self._restarting)
