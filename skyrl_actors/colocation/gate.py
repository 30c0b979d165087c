"""Turns at something that has one state at a time: who wants the same state shares it, who wants another waits.

A holder of state A never sees it change. Once somebody waits for another state, newcomers wait too, so nobody starves;
when the last holder leaves, the oldest waiter's state is entered together with every waiter of that same state.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from skyrl_actors.messages.errors import InternalError, StateLost, WeightsGone

K = TypeVar("K")


class Gate(Generic[K]):
    """`enter(old, new)` changes the state. If it raises, the gate is broken and says so to everybody from then on; with
    `after_failure` only those who wanted that state hear of it, and the gate goes on from that other state, or from the one it has
    when there was nothing to enter (WeightsGone)."""

    def __init__(
        self,
        start: K,
        enter: Callable[[K, K], Awaitable[None]],
        serves: Callable[[K, K], bool] = lambda current, wanted: current == wanted,
        after_failure: K | None = None,
    ):
        self.state = start
        self.broken: str | None = None
        self.num_holders = 0
        self._enter = enter
        self._serves = serves
        self._after_failure = after_failure
        self._waiters: deque[tuple[K, asyncio.Future[None]]] = deque()
        self._changing: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._queued = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Somebody holds its state, waits for one, or it changes."""
        return bool(self.num_holders or self._waiters or self._changing)

    @property
    def settled(self) -> bool:
        """Its state does not change, and nobody waits for another one."""
        return self._changing is None and not self._waiters

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def hold(self, wanted: K) -> AsyncGenerator[None]:
        await self._acquire(wanted)
        try:
            yield
        finally:
            self.num_holders -= 1
            self._left.set()
            self._turn()

    async def idle(self) -> None:
        """When nobody holds it."""
        while self.num_holders:
            self._left.clear()
            await self._left.wait()

    async def contended(self) -> None:
        """When somebody waits. A holder who hears it may leave early and come again."""
        while not self._waiters:
            self._queued.clear()
            await self._queued.wait()

    async def _acquire(self, wanted: K) -> None:
        self._raise_if_broken()
        if not self._waiters and self._changing is None and self._serves(self.state, wanted):
            self.num_holders += 1
            return
        ticket = asyncio.get_running_loop().create_future()
        self._waiters.append((wanted, ticket))
        self._queued.set()
        self._turn()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self.num_holders -= 1
            else:
                self._waiters = deque((k, t) for k, t in self._waiters if t is not ticket)
            self._turn()
            raise

    def _turn(self) -> None:
        if self.num_holders or self._changing or not self._waiters or self.broken:
            return
        wanted = self._waiters[0][0]
        if self._serves(self.state, wanted):
            self._admit(wanted)
        else:
            self._changing = asyncio.create_task(self._change(wanted))

    async def _change(self, wanted: K) -> None:
        try:
            await self._enter(self.state, wanted)
            self.state = wanted
        except Exception as error:  # noqa: BLE001  whoever waits must hear of it, whatever it was
            self._fail(wanted, error)
        else:
            self._changing = None
            self._admit(wanted)
        self._turn()

    def _fail(self, wanted: K, error: Exception) -> None:
        self._changing = None
        text = f"{wanted}: {error}"
        kind = next((kind for kind in (StateLost, WeightsGone) if isinstance(error, kind)), InternalError)
        if self._after_failure is None:
            self.broken = text
        elif kind is not WeightsGone:
            self.state = self._after_failure
        staying: deque[tuple[K, asyncio.Future[None]]] = deque()
        for key, ticket in self._waiters:
            if self.broken is None and key != wanted:
                staying.append((key, ticket))
            elif not ticket.done():
                ticket.set_exception(kind(f"could not enter {text}"))
        self._waiters = staying

    def _admit(self, wanted: K) -> None:
        staying: deque[tuple[K, asyncio.Future[None]]] = deque()
        for key, ticket in self._waiters:
            if ticket.done():
                continue
            if key == wanted or self._serves(self.state, key):
                self.num_holders += 1
                ticket.set_result(None)
            else:
                staying.append((key, ticket))
        self._waiters = staying

    def forget(self, state: K) -> None:
        """The state was lost from outside (dropped weights): it is now `state`. Nobody may hold."""
        if self.num_holders or self._changing:
            raise InternalError("the state changed under its holders")
        self.state = state

    def _raise_if_broken(self) -> None:
        if self.broken:
            raise InternalError(f"could not enter {self.broken}")
