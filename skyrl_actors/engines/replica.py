"""What all engines of a pool have in common: health, restarts, and the weights each one holds."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.backoff import RestartLimit
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.engines.health import Event, Health, after
from skyrl_actors.engines.interface import BASE_VERSION, EngineStatus
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.weights import WeightStream
from skyrl_actors.transfer.transport import EnginePlace

P = ParamSpec("P")
R = TypeVar("R")


class EngineReplica(ABC):
    """One engine of the pool, run by this service or by URL.

    `joining` holds a phase in which an engine may be awake. `on_change` runs on a change of health.
    """

    lock: StateLock[str]  # by the version of its full weights
    actor: ActorHandle | None = None  # None for an engine by URL
    place = EnginePlace(1)
    managed = True  # this service starts it, moves its memory and sends it full weights

    def __init__(self, name: str, restart: RestartConfig, report: Callable[[str], None]):
        self.name = name
        self.health: Health = "STARTING"
        self.reason: str | None = None
        self.restarts = 0
        self.delivered: dict[str, asyncio.Task[WeightStream | None]] = {}
        # Logprob checks by version; a finished task means that engine and trainer agree.
        self.agreed: dict[str, asyncio.Task[None]] = {}
        self.wanted = BASE_VERSION  # the full weights that were requested last
        self.moving = asyncio.Lock()  # held while it goes to sleep or loads weights
        self.joining: Callable[[], AbstractAsyncContextManager[None]] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._report = report
        self.restart = restart
        self._limit = RestartLimit(restart)
        self._restarting: asyncio.Task[None] | None = None
        self._detached = False  # supervision has stopped; an exit is expected

    @abstractmethod
    async def take_over(self) -> bool:
        """Attach to the engine as an earlier controller left it; return whether it runs."""

    @abstractmethod
    async def start(self) -> None:
        """Start the engine; on return it is HEALTHY with the base's weights."""

    @abstractmethod
    async def ask(
        self,
        method: Callable[Concatenate[Any, P], Awaitable[R]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """Call a method of `EngineProcess` on the engine.

        If it is gone or does not answer in time, begin its restart and raise StateLost.
        """

    @abstractmethod
    async def status(self) -> EngineStatus: ...

    @abstractmethod
    async def _come_back(self) -> None:
        """Restart the engine until HEALTHY. Raise InternalError if this attempt failed."""

    @abstractmethod
    async def detach(self) -> None:
        """Stop supervision and restarts."""

    @abstractmethod
    async def close(self) -> None: ...

    def log_tail(self) -> str:
        """Return the last lines that the engine logged before it died."""
        return ""

    def _step(self, event: Event) -> None:
        self.health = after(self.health, event)
        self.on_change()

    def start_later(self) -> None:
        """Start in the background; the other parts do not wait for it."""
        self.reason = "it did not run when the controller started"
        self._step("died")
        self.restart_if_dead()

    def worked(self) -> None:
        self._limit.succeeded()

    def died(self, reason: str) -> None:
        if self.health == "DEAD":
            return
        self.reason = reason
        self._step("died")
        if not self._detached:
            self._report(f"lost {self.name}: {reason}")
            self.restart_if_dead()

    def restart_now(self, reason: str) -> None:
        """End the engine at once and restart it; this does not count as a death."""
        self._limit.succeeded()
        self.died(reason)

    def restart_if_dead(self) -> None:
        """Restart a dead engine, unless a restart runs or the restart limit is reached."""
        if (
            self._detached
            or self.health != "DEAD"
            or (self._restarting is not None and not self._restarting.done())
        ):
            return
        if self._limit.may_try_again(asyncio.get_running_loop().time()):
            self._restarting = asyncio.create_task(self._restart_loop(), context=Context())

    @property
    def given_up(self) -> bool:
        return self.health == "DEAD" and (self._restarting is None or self._restarting.done())

    async def _restart_loop(self) -> None:
        log_tail, loop = self.log_tail(), asyncio.get_running_loop()
        try:
            while (pause_s := self._limit.died(loop.time())) is not None:
                await asyncio.sleep(pause_s)
                try:
                    await self._come_back()
                    self.restarts += 1
                    return
                except (ConfigError, InternalError) as error:
                    self.reason = str(error)
                    self._report(f"{self.name} did not start: {error}")
                    if self.health != "DEAD":
                        self._step("died")
            self.reason = f"{self.reason}\n{log_tail}".strip()
        finally:
            # Waiters for an engine check `given_up`, which is true only after this task ended.
            loop.call_soon(self.on_change)

    async def drain(self, timeout_s: float) -> None:
        """Accept no new samples; running ones may end within `timeout_s`."""
        if self.health == "HEALTHY":
            self._step("drain")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lock.idle(), timeout_s)

    async def _stop_restarts(self) -> None:
        self._detached = True
        await remote.ended(self._restarting)
