"""What all engines of a pool have in common: calls, and the weights that each one holds."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.actor import ActorHandle

from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.engines.interface import BASE_VERSION, EngineStatus
from skyrl_actors.messages.errors import PartDown
from skyrl_actors.supervision.supervisor import Supervisor
from skyrl_actors.transfer.transport import EnginePlace

P = ParamSpec("P")
R = TypeVar("R")
Incarnation = tuple[str, int]  # an engine's name and the number of its start


async def _prepared() -> None:
    """Prepare nothing."""


class EngineReplica(Supervisor):
    """One engine of the pool, run by this service or by URL.

    `joining` holds a phase in which an engine may be awake. `prepare` is awaited before its process
    starts.
    """

    lock: StateLock[str]  # by the version of its full weights
    actor: ActorHandle[Any] | None = None  # None for an engine by URL
    place = EnginePlace(1)
    managed = True  # this service starts it, moves its memory and sends it full weights

    def __init__(self, name: str, restart: RestartConfig, report: Callable[[str], None]):
        super().__init__(name, restart, report)
        self.incarnation: Incarnation = (name, 0)
        self.wanted = BASE_VERSION  # the full weights that were requested last
        self.num_samples = 0  # that run on it, or wait for its weights
        self.moving = asyncio.Lock()  # held while it goes to sleep or loads weights
        self.prepare: Callable[[], Awaitable[None]] = _prepared
        self.joining: Callable[[], AbstractAsyncContextManager[None]] | None = None

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

    @contextmanager
    def sampling(self) -> Generator[None]:
        """Count a sample that runs on it, or waits for its weights."""
        self.num_samples += 1
        try:
            yield
        finally:
            self.num_samples -= 1

    def _begin_incarnation(self) -> None:
        """Forget what the engine had before this start."""
        name, number = self.incarnation
        self.incarnation = (name, number + 1)

    def check_incarnation(self, incarnation: Incarnation) -> None:
        """Raise PartDown if the engine was started again, and has nothing of an earlier start."""
        if incarnation != self.incarnation:
            raise PartDown(f"{self.name} was restarted while this call waited")

    async def drain(self, timeout_s: float) -> None:
        """Accept no new samples; running ones may end within `timeout_s`."""
        if self.health == "HEALTHY":
            self._step("drain")
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.lock.idle()
