"""Serve tenants fairly by what their requests cost (pure).

Start-time fair queueing (Goyal, Vin and Cheng, 1997): each tenant has a clock that advances by the
cost of what it was given, divided by its weight. The tenant with the earliest clock is next. A
tenant without requests earns no credit for that time. Requests of one tenant keep their order.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")
OUTDATED = 64  # entries of the heap that may be outdated, besides one for each tenant


@dataclass(slots=True, eq=False)
class Tenant:
    """The requests of one tenant, and its clock. `order` grows with each new tenant."""

    name: str
    order: int
    clock: float
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
        self._now = 0.0  # the clock of the tenant that was served last
        self._tenants: dict[str, Tenant] = {}
        self._num_new = 0
        self._present = 0  # requests that wait or are held
        # (clock, order, name) of tenants with waiting requests. An entry with another clock than
        # the tenant's is outdated.
        self._next: list[tuple[float, int, str]] = []

    def add(self, name: str, item: T, cost: float, weight: float = 1.0) -> Ticket[T]:
        """Add a request of a tenant. `cost` is the most that it may take."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_new += 1
            tenant = self._tenants[name] = Tenant(name, self._num_new, self._now)
        if not tenant.held and not tenant.waiting:
            tenant.clock = max(tenant.clock, self._now)
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
        self._now = max(self._now, tenant.clock)
        self._charge(tenant, ticket.cost / ticket.weight)

    def settle(self, ticket: Ticket[T], cost: float) -> None:
        """End a request that was taken. Its tenant pays `cost` instead of the most."""
        self._charge(ticket.tenant, (cost - ticket.cost) / ticket.weight)
        ticket.tenant.held -= 1
        self._present -= 1
        self._forget(ticket.tenant)

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
        if len(self._next) > 2 * len(self._tenants) + OUTDATED:
            present = (one for one in self._tenants.values() if one.waiting)
            self._next = [(one.clock, one.order, one.name) for one in present]
            heapify(self._next)

    def _forget(self, tenant: Tenant) -> None:
        """Remove an idle tenant. One that was given more than others keeps its clock.

        All clocks are removed when all tenants are idle.
        """
        if tenant.held or tenant.waiting:
            return
        if not self._present:
            self._tenants.clear()
            self._next.clear()
        elif tenant.clock <= self._now and self._tenants.get(tenant.name) is tenant:
            del self._tenants[tenant.name]
