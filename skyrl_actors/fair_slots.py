"""Bound what runs at once, and share it fairly between tenants.

Samples are admitted to the engines in the order of a `FairQueue`, by the tokens of their prompts
and answers. Work of the ingress is admitted by the milliseconds that it takes.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from skyrl_actors.fair_queue import FairQueue, Ticket


@dataclass(slots=True)
class Place:
    """One request in the engines.

    `tokens` is the maximum at first. The holder replaces it by the number of tokens used. One that
    is cancelled does not know it and pays the maximum: otherwise a tenant that cancels its requests
    just before they end would always be the next.
    """

    sequences: int
    tokens: int


@dataclass(slots=True)
class Waiter:
    """A request that waits for admission."""

    place: Place
    ready: asyncio.Future[None]


class FairSlots:
    """Admit at most `limit` sequences at once; a request with more of them runs alone.

    Requests of one tenant are admitted in their order.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._is_paused = False
        self._queue = FairQueue[Waiter]()

    def pause(self, is_paused: bool) -> None:
        """Admit nobody, or admit again."""
        self._is_paused = is_paused
        self._admit()

    @asynccontextmanager
    async def hold(
        self, name: str, sequences: int, tokens: int, weight: float = 1.0
    ) -> AsyncGenerator[Place]:
        """Wait for admission of a request of tenant `name`, and hold its place."""
        place = Place(sequences, tokens)
        waiter = Waiter(place, asyncio.get_running_loop().create_future())
        ticket = self._queue.add(name, waiter, tokens, weight)
        self._admit()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter.ready.done() and not waiter.ready.cancelled():
                place.tokens = 0
                self._give(ticket)
            else:
                self._queue.withdraw(ticket)
                self._admit()
            raise
        try:
            yield place  # a holder that is cancelled has paid its maximum, or what it counted
        finally:
            self._give(ticket)

    def _admit(self) -> None:
        """Admit requests while they fit.

        Nobody overtakes the first one, so that a large request does not wait forever.
        """
        while not self._is_paused and (ticket := self._queue.first()) is not None:
            sequences, ready = ticket.item.place.sequences, ticket.item.ready
            if ready.done():  # cancelled
                self._queue.withdraw(ticket)
                continue
            if self._used and self._used + sequences > self._limit:
                return
            self._queue.take(ticket)
            self._used += sequences
            ready.set_result(None)

    def _give(self, ticket: Ticket[Waiter]) -> None:
        """Give back a place. The admission charged the maximum of tokens."""
        self._used -= ticket.item.place.sequences
        self._queue.settle(ticket, ticket.item.place.tokens)
        self._admit()
