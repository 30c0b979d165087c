"""Results and who waits for them. A result stays in memory until its time is over; the journal keeps it for longer."""

import asyncio
from collections import OrderedDict

from skyrl_actors.messages.results import Result


class ResultTable:
    def __init__(self, ttl_s: float):
        self._ttl_s = ttl_s
        self._futures: dict[str, asyncio.Future[Result]] = {}
        self._done: OrderedDict[str, float] = OrderedDict()  # request id -> loop time of its answer

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def open(self, request_id: str) -> None:
        self._futures[request_id] = asyncio.get_running_loop().create_future()

    def resolve(self, request_id: str, result: Result) -> None:
        self._futures[request_id].set_result(result)
        now = asyncio.get_running_loop().time()
        self._done[request_id] = now
        while self._done and now - next(iter(self._done.values())) > self._ttl_s:
            expired, _ = self._done.popitem(last=False)
            del self._futures[expired]

    async def wait(self, request_id: str, timeout_s: float) -> Result | None:
        """None when it is not ready in time. Only for ids that are in the table."""
        future = self._futures[request_id]
        if not future.done():
            await asyncio.wait([future], timeout=timeout_s)
        return future.result() if future.done() else None
