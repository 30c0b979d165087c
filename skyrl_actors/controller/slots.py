"""Places for samples in flight, given in turn to the tenants that wait for one: who asks for many does not keep out who asks
for one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """`limit` places. Within a tenant first come, first served; between tenants round robin."""

    def __init__(self, limit: int):
        self._free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        await self._take(tenant)
        try:
            yield
        finally:
            self._give()

    async def _take(self, tenant: str) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._give()  # it came in the same moment
            raise

    def _give(self) -> None:
        """To the next tenant's first; those that were cancelled are passed over."""
        while self._waiting:
            tenant, line = next(iter(self._waiting.items()))
            place = line.popleft()
            if line:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not place.done():
                place.set_result(None)
                return
        self._free += 1
