"""Bound the sampled sequences in the engines, and share them fairly between tenants.

Start-time fair queueing: each tenant has a clock that advances by the tokens that it was given,
divided by its weight. The tenant with the earliest clock is admitted first. A tenant without
requests earns no credit for that time.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True)
class Place:
    """One request in the engines.

    `tokens` is the maximum at first. The holder replaces it by the number of tokens used.
    """

    sequences: int
    tokens: int
    weight: float = 1.0


@dataclass(slots=True)
class Waiter:
    """A request that waits for admission."""

    place: Place
    ready: asyncio.Future[None]


@dataclass(slots=True)
class Tenant:
    """The requests of one tenant.

    `clock` counts the tokens given to it, divided by its weight. It starts at the clock of the
    tenant that was served last. `order` grows with each new tenant.
    """

    order: int
    clock: float = 0.0
    held: int = 0
    waiting: deque[Waiter] = field(default_factory=deque[Waiter])


class FairSlots:
    """Admit at most `limit` sequences at once; a request with more of them runs alone.

    Requests of one tenant are admitted in their order.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._is_paused = False
        self._now = 0.0  # the clock of the tenant that was served last
        self._tenants: dict[str, Tenant] = {}
        self._num_new = 0
        self._present = 0  # requests that wait or are admitted
        # (clock, order, name) of tenants with waiting requests. An entry with another clock than
        # the tenant's is outdated.
        self._next: list[tuple[float, int, str]] = []

    def pause(self, is_paused: bool) -> None:
        """Admit nobody, or admit again."""
        self._is_paused = is_paused
        self._admit()

    @asynccontextmanager
    async def hold(
        self, name: str, sequences: int, tokens: int, weight: float = 1.0
    ) -> AsyncGenerator[Place]:
        """Wait for admission of a request of tenant `name`, and hold its place."""
        place = Place(sequences, tokens, weight)
        tenant = self._tenant(name)
        await self._take(name, tenant, place)
        try:
            yield place
        finally:
            # The admission charged the maximum.
            self._charge(name, tenant, (place.tokens - tokens) / weight)
            self._give(name, tenant, place)

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_new += 1
            tenant = self._tenants[name] = Tenant(order=self._num_new, clock=self._now)
        if not tenant.held and not tenant.waiting:
            tenant.clock = max(tenant.clock, self._now)
        return tenant

    async def _take(self, name: str, tenant: Tenant, place: Place) -> None:
        waiter = Waiter(place, asyncio.get_running_loop().create_future())
        tenant.waiting.append(waiter)
        self._present += 1
        if len(tenant.waiting) == 1:
            self._charge(name, tenant, 0.0)
        self._admit()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.done() and not waiter.ready.cancelled():
                self._charge(name, tenant, -place.tokens / place.weight)
                self._give(name, tenant, place)
            else:
                if waiter in tenant.waiting:
                    tenant.waiting.remove(waiter)
                    self._present -= 1
                self._forget(name, tenant)
                self._admit()
            raise

    def _charge(self, name: str, tenant: Tenant, amount: float) -> None:
        """Advance a tenant's clock, and give its waiting requests their new place in the order."""
        tenant.clock += amount
        if tenant.waiting:
            heappush(self._next, (tenant.clock, tenant.order, name))

    def _admit(self) -> None:
        """Admit requests while they fit, the tenant with the earliest clock first.

        No other tenant overtakes it, so that a large request does not wait forever.
        """
        while self._next and not self._is_paused:
            clock, order, name = self._next[0]
            tenant = self._tenants.get(name)
            if (
                tenant is None
                or (tenant.clock, tenant.order) != (clock, order)
                or not tenant.waiting
            ):
                heappop(self._next)
                continue
            place = tenant.waiting[0].place
            if tenant.waiting[0].ready.done():  # cancelled
                tenant.waiting.popleft()
                self._present -= 1
                continue
            if self._used and self._used + place.sequences > self._limit:
                return
            heappop(self._next)
            waiter = tenant.waiting.popleft()
            self._now = max(self._now, tenant.clock)
            self._used += place.sequences
            tenant.held += 1
            self._charge(name, tenant, place.tokens / place.weight)
            waiter.ready.set_result(None)

    def _give(self, name: str, tenant: Tenant, place: Place) -> None:
        self._used -= place.sequences
        self._present -= 1
        tenant.held -= 1
        self._forget(name, tenant)
        self._admit()

    def _forget(self, name: str, tenant: Tenant) -> None:
        """Remove an idle tenant. One that was given more than others keeps its clock.

        All clocks are removed when all tenants are idle.
        """
        if tenant.held or tenant.waiting:
            return
        if not self._present:
            self._tenants.clear()
            self._next.clear()
        elif tenant.clock <= self._now and self._tenants.get(name) is tenant:
            del self._tenants[name]
