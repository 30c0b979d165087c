"""Answers in memory, and callers that wait for them.

An answer stays in memory for a time and within a bound in bytes. The journal keeps it for longer.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine
from typing import Any

from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.results import Result
from skyrl_actors.messages.sizes import size_of


class ResultTable:
    """Answers by request id, with at most `limit_bytes` together.

    Beyond that, the owner with the most bytes loses the oldest answers. They are then read from
    the journal.
    """

    def __init__(self, ttl_s: float, limit_bytes: int):
        self.ttl_s = ttl_s
        self._limit_bytes = limit_bytes
        self._futures: dict[str, asyncio.Future[Result]] = {}
        # owner -> request id -> bytes of its answer, oldest first
        self._kept: dict[str, OrderedDict[str, int]] = {}
        self._bytes_of: Counter[str] = Counter()
        # Of all answers, oldest first: arrival, owner, request id. Some may be dropped already.
        self._arrivals: deque[tuple[float, str, str]] = deque()
        self.num_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def in_memory(self, request_id: str) -> Result | None:
        """Return an answer, or None when it is not in memory."""
        future = self._futures.get(request_id)
        return future.result() if future is not None and future.done() else None

    def size_of(self, request_id: str) -> int:
        """Return the bytes of an answer in memory."""
        return self._kept[owner_of(request_id)][request_id]

    def open(self, request_id: str) -> None:
        """Add a request without an answer."""
        self._futures[request_id] = asyncio.get_running_loop().create_future()

    def resolve(self, request_id: str, result: Result) -> None:
        """Set the answer of a request, and drop answers that expired or exceed the bound."""
        self._futures[request_id].set_result(result)
        owner, now = owner_of(request_id), asyncio.get_running_loop().time()
        num_bytes = size_of(result)
        self._kept.setdefault(owner, OrderedDict())[request_id] = num_bytes
        self._arrivals.append((now, owner, request_id))
        self._bytes_of[owner] += num_bytes
        self.num_bytes += num_bytes
        self._drop_expired(now)
        while self.num_bytes > self._limit_bytes:
            self._drop_oldest(max(self._bytes_of, key=self._bytes_of.__getitem__))

    def _drop_expired(self, now: float) -> None:
        while self._arrivals and now - self._arrivals[0][0] > self.ttl_s:
            _, owner, request_id = self._arrivals.popleft()
            if request_id in self._kept.get(owner, ()):  # its owner's oldest one, then
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        request_id, num_bytes = self._kept[owner].popitem(last=False)
        del self._futures[request_id]
        self.num_bytes -= num_bytes
        self._bytes_of[owner] -= num_bytes
        if not self._kept[owner]:
            del self._kept[owner], self._bytes_of[owner]

    def wait(self, request_id: str, timeout_s: float) -> Coroutine[Any, Any, Result | None]:
        """Wait for an answer; None when it is not ready in time.

        The id must be in the table when this is called.
        """
        return self._wait(self._futures[request_id], timeout_s)

    @staticmethod
    async def _wait(future: "asyncio.Future[Result]", timeout_s: float) -> Result | None:
        if not future.done():
            await asyncio.wait([future], timeout=timeout_s)
        return future.result() if future.done() else None
