"""Results and who waits for them. An answer stays in memory for a while and within a bound; the journal keeps it for longer."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.results import Result
from skyrl_actors.messages.sizes import size_of


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer in memory: since when on the loop's clock, and its bytes."""

    since: float
    num_bytes: int


class ResultTable:
    """Answers may have `limit_bytes` together. When they have more, the owner with the most bytes loses the oldest ones;
    whoever asks for them reads them from the journal."""

    def __init__(self, ttl_s: float, limit_bytes: int):
        self._ttl_s = ttl_s
        self._limit_bytes = limit_bytes
        self._futures: dict[str, asyncio.Future[Result]] = {}
        self._kept: dict[str, OrderedDict[str, Kept]] = {}  # owner -> request id -> answer, oldest first
        self._bytes_of: Counter[str] = Counter()
        self.num_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def open(self, request_id: str) -> None:
        self._futures[request_id] = asyncio.get_running_loop().create_future()

    def resolve(self, request_id: str, result: Result) -> None:
        self._futures[request_id].set_result(result)
        owner, now = owner_of(request_id), asyncio.get_running_loop().time()
        kept = Kept(now, size_of(result))
        self._kept.setdefault(owner, OrderedDict())[request_id] = kept
        self._bytes_of[owner] += kept.num_bytes
        self.num_bytes += kept.num_bytes
        self._drop_expired(now)
        while self.num_bytes > self._limit_bytes:
            self._drop_oldest(max(self._bytes_of, key=lambda name: self._bytes_of[name]))

    def _drop_expired(self, now: float) -> None:
        for owner in list(self._kept):
            while (kept := self._kept.get(owner)) and now - next(iter(kept.values())).since > self._ttl_s:
                self._drop_oldest(owner)

    def _drop_oldest(self, owner: str) -> None:
        request_id, kept = self._kept[owner].popitem(last=False)
        del self._futures[request_id]
        self.num_bytes -= kept.num_bytes
        self._bytes_of[owner] -= kept.num_bytes
        if not self._kept[owner]:
            del self._kept[owner], self._bytes_of[owner]

    def wait(self, request_id: str, timeout_s: float) -> Coroutine[Any, Any, Result | None]:
        """None when it is not ready in time. Only for ids that are in the table when this is called."""
        return self._wait(self._futures[request_id], timeout_s)

    @staticmethod
    async def _wait(future: "asyncio.Future[Result]", timeout_s: float) -> Result | None:
        if not future.done():
            await asyncio.wait([future], timeout=timeout_s)
        return future.result() if future.done() else None
