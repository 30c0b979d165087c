"""A shared lock keyed by state: holders of one state run together; another state waits.

The state never changes while it is held. Once another state is requested, new requests queue, so
that no request starves. When the last holder leaves, the lock enters the state of the oldest
request and admits all requests for that state. A failed change leaves the lock usable: it is
retried after a pause, or the requests for that state get the error.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from skyrl_actors.messages.errors import InternalError, PartDown, StateLost, WeightsGone

K = TypeVar("K")
KINDS = (PartDown, StateLost, WeightsGone)  # errors that requests get with their own type


def _never(wanted: object, error: Exception) -> None:
    return None


class StateLock(Generic[K]):
    """Lock one state at a time.

    `enter(old, new)` changes the state. `serves(current, wanted)` returns whether no change is
    needed.

    When `enter` raises:
    - `after_failure` becomes the state. If it is None, the state stays, because `serves` knows what
      is there. The state also stays after WeightsGone, which means that nothing was touched.
    - `retry` returns the seconds until the next try. Requests for that state wait, and other states
      can be entered meanwhile. If it returns None, the requests get the error.
    """

    def __init__(
        self,
        start: K,
        enter: Callable[[K, K], Awaitable[None]],
        serves: Callable[[K, K], bool] = lambda current, wanted: current == wanted,
        after_failure: K | None = None,
        retry: Callable[[K, Exception], float | None] = _never,
    ):
        self.state = start
        self.num_holders = 0
        self._enter = enter
        self._serves = serves
        self._after_failure = after_failure
        self._retry = retry
        self._waiters: deque[tuple[K, asyncio.Future[None]]] = deque()
        self._resting: dict[K, asyncio.TimerHandle] = {}  # failed states, until their next try
        self._changing: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._queued = asyncio.Event()

    @property
    def busy(self) -> bool:
        """The state is held, requested or changing."""
        return bool(self.num_holders or self._waiters or self._changing)

    @property
    def settled(self) -> bool:
        """The state does not change, and no other state is requested."""
        return self._changing is None and not self._waiters

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @property
    def resting(self) -> bool:
        """A request waits for a failed state that is not due for its next try."""
        return any(key in self._resting for key, _ in self._waiters)

    @asynccontextmanager
    async def hold(self, wanted: K) -> AsyncGenerator[None]:
        await self._acquire(wanted)
        try:
            yield
        finally:
            self.num_holders -= 1
            self._left.set()
            self._advance()

    async def idle(self) -> None:
        """Return when the state has no holders."""
        while self.num_holders:
            self._left.clear()
            await self._left.wait()

    async def contended(self) -> None:
        """Return when a state is requested that can be tried; a holder may then leave early."""
        while self._next() is None:
            self._queued.clear()
            await self._queued.wait()

    async def _acquire(self, wanted: K) -> None:
        if self._next() is None and self._changing is None and self._serves(self.state, wanted):
            self.num_holders += 1
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((wanted, ticket))
        self._queued.set()
        self._advance()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self.num_holders -= 1
                self._left.set()
            else:
                self._waiters = deque((k, t) for k, t in self._waiters if t is not ticket)
            self._advance()
            raise

    def _next(self) -> tuple[K, asyncio.Future[None]] | None:
        """Return the oldest request that can be served now, or whose state can be tried."""
        if not self._resting:
            return self._waiters[0] if self._waiters else None
        ready = (
            w for w in self._waiters if w[0] not in self._resting or self._serves(self.state, w[0])
        )
        return next(ready, None)

    def _advance(self) -> None:
        if self.num_holders or self._changing:
            return
        first = self._next()
        if first is None:
            return
        if self._serves(self.state, first[0]):
            self._admit(first[0])
        else:
            self._changing = asyncio.create_task(self._change(first[0]))

    async def _change(self, wanted: K) -> None:
        try:
            await self._enter(self.state, wanted)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the event loop ends; otherwise something inside was cancelled: a failure
            self._fail(wanted, InternalError("it was cancelled"))
        except Exception as error:  # noqa: BLE001  requests must get the error, whatever its type
            self._fail(wanted, error)
        else:
            self._changing = None
            self.state = wanted
            self._admit(wanted)
        self._advance()

    def _fail(self, wanted: K, error: Exception) -> None:
        self._changing = None
        if self._after_failure is not None and not isinstance(error, WeightsGone):
            self.state = self._after_failure
        pause_s = self._retry(wanted, error)
        if pause_s is not None:
            loop = asyncio.get_running_loop()
            self._resting[wanted] = loop.call_later(pause_s, self._retry_due, wanted)
            return
        kind = next((kind for kind in KINDS if isinstance(error, kind)), InternalError)
        staying: deque[tuple[K, asyncio.Future[None]]] = deque()
        for key, ticket in self._waiters:
            if key != wanted:
                staying.append((key, ticket))
            elif not ticket.done():
                ticket.set_exception(kind(f"could not enter {wanted}: {error}"))
        self._waiters = staying

    def _retry_due(self, state: K) -> None:
        del self._resting[state]
        self._queued.set()
        self._advance()

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
        """Record that the state was lost from outside (dropped weights). It must not be held."""
        if self.num_holders or self._changing:
            raise InternalError("the state changed under its holders")
        self.state = state
