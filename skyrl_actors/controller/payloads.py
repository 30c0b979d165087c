"""Bound the bytes of request payloads in memory.

A payload that is in the journal may leave memory until its request runs. Payloads of running
requests stay in memory, and as many of waiting ones as fit beside them. The others are read from
the journal when their requests start. A request that starts evicts payloads of waiting ones.
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
    """Keep `running + waiting <= limit` bytes. A single larger payload runs alone.

    Payloads up to `small` bytes are not counted: an unload must never wait for a create that waits
    for it. Their memory is bounded by the number of open requests.
    """

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
        """Add a journaled request that waits. Without space, its payload leaves memory now."""
        if payload.num_bytes <= self.small:
            return
        if self._queue or self.num_bytes + payload.num_bytes > self.limit:
            payload.request = None
            return
        self._waiting[payload.request_id] = payload
        self._waiting_bytes += payload.num_bytes

    async def start(self, payload: Payload) -> None:
        """Reserve memory for a request that starts. Waits in order for running requests to end."""
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
            self._running_bytes -= payload.num_bytes  # `_admit` has reserved it already
        self._running[request_id] = payload.num_bytes
        self._running_bytes += payload.num_bytes
        self._evict()

    def end(self, request_id: str) -> None:
        """Release the memory of an answered request, whether it started or not."""
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
        """Evict payloads of waiting requests, the newest first, because it runs last."""
        while self._waiting and self.num_bytes > self.limit:
            _, payload = self._waiting.popitem()
            self._waiting_bytes -= payload.num_bytes
            payload.request = None
