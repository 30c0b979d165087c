"""Serve tenants fairly by what their requests cost (pure).

After start-time fair queueing (Goyal, Vin and Cheng, 1997): each tenant has a clock that advances
by the cost of what it was given, divided by its weight. The tenant with the earliest clock is next.
Requests of one tenant keep their order.

Many requests run at once, and their real cost is known when they end. So a clock has two parts:
what was paid, and what running requests may cost at most. A tenant that comes, or comes back,
starts at the clock that was served last, or at the lowest paid part of those that are there if
that is earlier. So it earns no credit for its absence, and does not wait for a burst of others that
runs.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")
OUTDATED = 64  # entries of the heap that may be outdated, besides one for each tenant


@dataclass(slots=True, eq=False)
class Tenant:
    """The requests of one tenant, and its clock, of which `paid` is for requests that ended.

    `order` grows with each new tenant.
    """

    name: str
    order: int
    clock: float
    paid: float
    held: int = 0  # requests that were taken and are not settled
    waiting: "deque[Ticket[Any]]" = field(default_factory=deque["Ticket[Any]"])


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """One request in the queue, or taken out of it."""

    tenant: Tenant
    item: T
    cost: float
    weight: float


class FairQueue(Generic[T]):
    """A queue of requests of several tenants, in fair order."""

    def __init__(self) -> None:
        self._last = 0.0  # the clock of the tenant that was served last
        self._tenants: dict[str, Tenant] = {}
        self._num_new = 0
        self._present = 0  # requests that wait or are held
        # (clock, order, name) of tenants with waiting requests. An entry with another clock than
        # the tenant's is outdated.
        self._next: list[tuple[float, int, str]] = []
        self._paid: list[tuple[float, int, str]] = []  # the same for all tenants that are there

    def add(self, name: str, item: T, cost: float, weight: float = 1.0) -> Ticket[T]:
        """Add a request of a tenant. `cost` is the most that it may take."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_new += 1
            tenant = self._tenants[name] = Tenant(name, self._num_new, 0.0, 0.0)
        if not tenant.held and not tenant.waiting:
            tenant.clock = tenant.paid = max(tenant.clock, self._start())
            heappush(self._paid, (tenant.paid, tenant.order, name))
        ticket = Ticket(tenant, item, cost, weight)
        tenant.waiting.append(ticket)
        self._present += 1
        if len(tenant.waiting) == 1:
            self._charge(tenant, 0.0)
        return ticket

    def first(self) -> Ticket[T] | None:
        """Return the request that is next, and leave it in the queue."""
        while self._next:
            clock, order, name = self._next[0]
            tenant = self._tenants.get(name)
            is_current = tenant is not None and (tenant.clock, tenant.order) == (clock, order)
            if tenant is not None and is_current and tenant.waiting:
                return tenant.waiting[0]
            heappop(self._next)
        return None

    def take(self, ticket: Ticket[T]) -> None:
        """Take out the request that `first` returned, and charge its tenant."""
        tenant = ticket.tenant
        assert tenant.waiting[0] is ticket
        tenant.waiting.popleft()
        heappop(self._next)
        tenant.held += 1
        self._last = tenant.clock
        self._charge(tenant, ticket.cost / ticket.weight)

    def settle(self, ticket: Ticket[T], cost: float) -> None:
        """End a request that was taken. Its tenant pays `cost` instead of the most."""
        tenant = ticket.tenant
        self._charge(tenant, (cost - ticket.cost) / ticket.weight)
        tenant.paid += cost / ticket.weight
        heappush(self._paid, (tenant.paid, tenant.order, tenant.name))
        tenant.held -= 1
        self._present -= 1
        self._forget(tenant)

    def withdraw(self, ticket: Ticket[T]) -> None:
        """Remove a request that waits. Idempotent."""
        if ticket in ticket.tenant.waiting:
            ticket.tenant.waiting.remove(ticket)
            self._present -= 1
        self._forget(ticket.tenant)

    def _charge(self, tenant: Tenant, amount: float) -> None:
        """Advance a tenant's clock, and give its waiting requests their new place in the order."""
        tenant.clock += amount
        if tenant.waiting:
            heappush(self._next, (tenant.clock, tenant.order, tenant.name))
        most = 2 * len(self._tenants) + OUTDATED
        tenants = self._tenants.values()
        if len(self._next) > most:
            self._next = [(one.clock, one.order, one.name) for one in tenants if one.waiting]
            heapify(self._next)
        if len(self._paid) > most:
            there = (one for one in tenants if one.waiting or one.held)
            self._paid = [(one.paid, one.order, one.name) for one in there]
            heapify(self._paid)

    def _start(self) -> float:
        """Return the clock at which a tenant starts that was not there."""
        while self._paid:
            paid, order, name = self._paid[0]
            tenant = self._tenants.get(name)
            is_there = tenant is not None and (tenant.waiting or tenant.held)
            if tenant is not None and is_there and (tenant.paid, tenant.order) == (paid, order):
                return min(paid, self._last)
            heappop(self._paid)
        return 0.0  # nobody is there

    def _forget(self, tenant: Tenant) -> None:
        """Remove an idle tenant. One that was given more than others keeps its clock.

        All clocks are removed when all tenants are idle.
        """
        if tenant.held or tenant.waiting:
            return
        if not self._present:
            self._tenants.clear()
            self._next.clear()
            self._paid.clear()
            self._last = 0.0
        elif tenant.clock <= self._start() and self._tenants.get(tenant.name) is tenant:
            del self._tenants[tenant.name]
