"""Bound the bytes of request payloads in memory.

A payload that is in the journal may leave memory until its request runs. Payloads of running
requests stay in memory, and as many of waiting ones as fit beside them. The others are read from
the journal when their requests start. A request that starts evicts payloads of waiting ones.

Each base model has its share: requests that have started may wait long for a base model that has
not got the devices, and those of the others run meanwhile.
"""

import asyncio
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Protocol

from skyrl_actors.messages.requests import Request


class Payload(Protocol):
    """An operation whose `request` is None while it is in the journal only."""

    request_id: str
    request: Request | None
    num_bytes: int
    base_model: str  # known when it starts


SMALL_BYTES = 64 * 2**10


class PayloadMemory:
    """Keep `running + waiting <= limit` bytes, with `shares` base models.

    Of each base model, one payload runs even if it is larger than its share.

    Payloads up to `small` bytes are not counted: an unload must never wait for a create that waits
    for it. Their memory is bounded by the number of open requests.
    """

    def __init__(self, limit: int, small: int = SMALL_BYTES, shares: int = 1):
        self.limit = limit
        self.small = small
        self.shares = shares
        self._running: dict[str, tuple[str, int]] = {}  # base model and bytes
        self._of_base: Counter[str] = Counter()
        self._waiting: OrderedDict[str, Payload] = OrderedDict()
        self._running_bytes = 0
        self._waiting_bytes = 0
        self._queues: defaultdict[str, deque[tuple[int, asyncio.Future[None]]]] = defaultdict(deque)

    @property
    def num_bytes(self) -> int:
        return self._running_bytes + self._waiting_bytes

    def keep(self, payload: Payload) -> None:
        """Add a journaled request that waits. Without space, its payload leaves memory now."""
        if payload.num_bytes <= self.small:
            return
        if any(self._queues.values()) or self.num_bytes + payload.num_bytes > self.limit:
            payload.request = None
            return
        self._waiting[payload.request_id] = payload
        self._waiting_bytes += payload.num_bytes

    async def start(self, payload: Payload) -> None:
        """Reserve memory for a request that starts. Waits in order for running requests to end."""
        request_id, base = payload.request_id, payload.base_model
        if request_id in self._running or payload.num_bytes <= self.small:
            return
        queue = self._queues[base]
        is_kept = self._waiting.pop(request_id, None) is not None
        if is_kept:
            self._waiting_bytes -= payload.num_bytes
        if (queue and not is_kept) or not self._fits(base, payload.num_bytes):
            payload.request = None  # until there is room for it
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append((payload.num_bytes, room))
            try:
                await room
            except asyncio.CancelledError:
                if room.done() and not room.cancelled():
                    self._count(base, -payload.num_bytes)
                self._admit(base)
                raise
            self._count(base, -payload.num_bytes)  # `_admit` has reserved it already
        self._running[request_id] = base, payload.num_bytes
        self._count(base, payload.num_bytes)
        self._evict()

    def end(self, request_id: str) -> None:
        """Release the memory of an answered request, whether it started or not."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.num_bytes
        base, num_bytes = self._running.pop(request_id, ("", 0))
        self._count(base, -num_bytes)
        self._admit(base)

    def _count(self, base: str, num_bytes: int) -> None:
        self._running_bytes += num_bytes
        self._of_base[base] += num_bytes

    def _fits(self, base: str, num_bytes: int) -> bool:
        own = self._of_base[base]
        return not own or own + num_bytes <= self.limit // self.shares

    def _admit(self, base: str) -> None:
        queue = self._queues[base]
        while queue and (queue[0][1].done() or self._fits(base, queue[0][0])):
            num_bytes, room = queue.popleft()
            if not room.done():
                self._count(base, num_bytes)
                room.set_result(None)

    def _evict(self) -> None:
        """Evict payloads of waiting requests, the newest first, because it runs last."""
        while self._waiting and self.num_bytes > self.limit:
            _, payload = self._waiting.popitem()
            self._waiting_bytes -= payload.num_bytes
            payload.request = None
