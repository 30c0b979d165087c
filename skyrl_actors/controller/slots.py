"""Places for sampled sequences in the engines, shared fairly between tenants.

Start-time fair queueing with one weight for all: each tenant has a clock that advances by the tokens that it was given, and
the tenant whose clock is earliest goes first. A tenant that comes back is not paid for the time it was away.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Place:
    """One request in the engines. `tokens` is the most it may take; its user sets what it took."""

    sequences: int
    tokens: int


@dataclass(slots=True)
class Waiter:
    place: Place
    ready: asyncio.Future[None]


@dataclass(slots=True)
class Tenant:
    """`clock`: tokens given to this tenant so far, or what the others had when it came."""

    clock: int = 0
    held: int = 0
    waiting: deque[Waiter] = field(default_factory=deque[Waiter])


class FairSlots:
    """`limit` sequences at once; a request with more of them runs alone. Within a tenant first come, first served."""

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._now = 0  # the clock of the tenant that was served last
        self._tenants: dict[str, Tenant] = {}

    @asynccontextmanager
    async def hold(self, name: str, sequences: int, tokens: int) -> AsyncIterator[Place]:
        place = Place(sequences, tokens)
        tenant = self._tenant(name)
        await self._take(name, tenant, place)
        try:
            yield place
        finally:
            tenant.clock += place.tokens - tokens  # it was charged for the most it could take
            self._give(name, tenant, place)

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.setdefault(name, Tenant(clock=self._now))
        if not tenant.held and not tenant.waiting:
            tenant.clock = max(tenant.clock, self._now)
        return tenant

    async def _take(self, name: str, tenant: Tenant, place: Place) -> None:
        waiter = Waiter(place, asyncio.get_running_loop().create_future())
        tenant.waiting.append(waiter)
        self._admit()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.done() and not waiter.ready.cancelled():
                tenant.clock -= place.tokens
                self._give(name, tenant, place)
            else:
                if waiter in tenant.waiting:
                    tenant.waiting.remove(waiter)
                self._forget(name, tenant)
                self._admit()
            raise

    def _admit(self) -> None:
        """Nobody overtakes the tenant whose turn it is, so that a large request is not passed by for ever."""
        while ready := [tenant for tenant in self._tenants.values() if tenant.waiting]:
            tenant = min(ready, key=lambda tenant: tenant.clock)
            place = tenant.waiting[0].place
            if tenant.waiting[0].ready.done():  # cancelled
                tenant.waiting.popleft()
                continue
            if self._used and self._used + place.sequences > self._limit:
                return
            waiter = tenant.waiting.popleft()
            self._now = max(self._now, tenant.clock)
            self._used += place.sequences
            tenant.held += 1
            tenant.clock += place.tokens
            waiter.ready.set_result(None)

    def _give(self, name: str, tenant: Tenant, place: Place) -> None:
        self._used -= place.sequences
        tenant.held -= 1
        self._forget(name, tenant)
        self._admit()

    def _forget(self, name: str, tenant: Tenant) -> None:
        """A tenant that was given more than others keeps its clock, unless nobody else wants anything."""
        if tenant.held or tenant.waiting:
            return
        if not any(other.held or other.waiting for other in self._tenants.values()):
            self._tenants.clear()
        elif tenant.clock <= self._now:
            self._tenants.pop(name, None)
