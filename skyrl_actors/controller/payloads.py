"""Which requests' payloads are in memory.

A payload that is in the journal may leave memory until its request runs. Payloads of requests that run, and as many of
those that wait as fit beside them, are kept within one bound in bytes; the others are read from the journal when they
are wanted. A request that starts takes the room of those that wait.
"""

import asyncio
from collections import OrderedDict, deque
from typing import Protocol

from skyrl_actors.messages.requests import Request


class Payload(Protocol):
    """An operation whose `request` is None while it is in the journal only."""

    request_id: str
    request: Request | None
    num_bytes: int


SMALL_BYTES = 64 * 2**10


class PayloadMemory:
    """`running + waiting <= limit`, except when a single payload is larger: then it runs alone. Small payloads are not
    counted: an unload must never wait for a create that waits for it, and open requests are bounded in number."""

    def __init__(self, limit: int, small: int = SMALL_BYTES):
        self.limit = limit
        self.small = small
        self._running: dict[str, int] = {}
        self._waiting: OrderedDict[str, Payload] = OrderedDict()
        self._running_bytes = 0
        self._waiting_bytes = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_bytes(self) -> int:
        return self._running_bytes + self._waiting_bytes

    def keep(self, payload: Payload) -> None:
        """A request that was journaled waits for its turn. Its payload leaves memory now if there is no room."""
        if payload.num_bytes <= self.small:
            return
        if self._queue or self.num_bytes + payload.num_bytes > self.limit:
            payload.request = None
            return
        self._waiting[payload.request_id] = payload
        self._waiting_bytes += payload.num_bytes

    async def start(self, payload: Payload) -> None:
        """Its payload may be in memory from now on. Waits, first come, first served, for requests that run."""
        request_id = payload.request_id
        if request_id in self._running or payload.num_bytes <= self.small:
            return
        if self._waiting.pop(request_id, None) is not None:
            self._waiting_bytes -= payload.num_bytes
        elif self._queue or not self._fits(payload.num_bytes):
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append((payload.num_bytes, room))
            try:
                await room
            except asyncio.CancelledError:
                if room.done() and not room.cancelled():
                    self._running_bytes -= payload.num_bytes
                self._admit()
                raise
            self._running_bytes -= payload.num_bytes  # booked for it by whoever woke it
        self._running[request_id] = payload.num_bytes
        self._running_bytes += payload.num_bytes
        self._evict()

    def end(self, request_id: str) -> None:
        """It was answered. Fine to call for one that never started."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.num_bytes
        self._running_bytes -= self._running.pop(request_id, 0)
        self._admit()

    def _fits(self, num_bytes: int) -> bool:
        return not self._running_bytes or self._running_bytes + num_bytes <= self.limit

    def _admit(self) -> None:
        while self._queue and (self._queue[0][1].done() or self._fits(self._queue[0][0])):
            num_bytes, room = self._queue.popleft()
            if not room.done():
                self._running_bytes += num_bytes
                room.set_result(None)

    def _evict(self) -> None:
        """The newest first: it runs last."""
        while self._waiting and self.num_bytes > self.limit:
            _, payload = self._waiting.popitem()
            self._waiting_bytes -= payload.num_bytes
            payload.request = None
