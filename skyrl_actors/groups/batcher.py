"""Batch forward-backward calls: calls that arrive during a computation form the next batch.

Tenants are served in the order of a `FairQueue`, by the tokens of their calls. So a tenant with
large batches, or with many models, does not slow the others more than its share.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_actors.fair_queue import FairQueue, Ticket
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.results import LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model, with its input and its loss. `weight`: of its tenant."""

    model_id: str
    precondition: OpPrecondition
    columns: Columns
    loss: LossCall | None
    forward_only: bool
    weight: float = 1.0


Compute = Callable[[Sequence[Call]], Awaitable[Sequence[LossOutput | BaseException]]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call that waits for its batch, and the future of its result."""

    call: Call
    result: asyncio.Future[LossOutput]


class Batcher:
    """Run batches of calls one at a time, in fair order of their tenants.

    A batch holds up to `limit_tokens`; a larger call runs alone. When a batch of several calls
    fails, the faulty call is unknown. So each call fails with StateLost, and its retry runs alone.
    """

    def __init__(self, compute: Compute, limit_tokens: int):
        self._compute = compute
        self._limit = limit_tokens
        # Models of failed batches; their next calls run alone.
        self._alone: set[str] = set()
        self._queue = FairQueue[Waiting]()
        self._running: asyncio.Task[None] | None = None

    async def run(self, call: Call) -> LossOutput:
        """Queue the call, and return its result after its batch is computed."""
        future: asyncio.Future[LossOutput] = asyncio.get_running_loop().create_future()
        tokens = call.columns.num_tokens
        waiting = Waiting(call, future)
        ticket = self._queue.add(tenant_of(call.model_id), waiting, tokens, call.weight)
        if self._running is None:
            self._running = asyncio.create_task(self._drain())
        try:
            return await future
        except asyncio.CancelledError:
            self._queue.withdraw(ticket)  # unless it is computed already
            raise

    async def _drain(self) -> None:
        try:
            while self._queue.first() is not None:
                # Let calls that were submitted together join the batch.
                await asyncio.sleep(0)
                if not (batch := self._next_batch()):
                    break
                try:
                    await self._run_batch([ticket.item for ticket in batch])
                finally:
                    for ticket in batch:
                        self._queue.settle(ticket, ticket.cost)
        finally:
            self._running = None

    def _next_batch(self) -> list[Ticket[Waiting]]:
        first = self._queue.first()
        if first is None:  # all calls were cancelled
            return []
        self._queue.take(first)
        batch, size = [first], first.item.call.columns.num_tokens
        if first.item.call.model_id in self._alone:
            self._alone.discard(first.item.call.model_id)
            return batch
        while (ticket := self._queue.first()) is not None:
            call = ticket.item.call
            size += call.columns.num_tokens
            if (
                call.forward_only != first.item.call.forward_only
                or size > self._limit
                or call.model_id in self._alone
            ):
                break
            self._queue.take(ticket)
            batch.append(ticket)
        return batch

    async def _run_batch(self, batch: Sequence[Waiting]) -> None:
        futures = [waiting.result for waiting in batch]
        calls = [waiting.call for waiting in batch]
        try:
            (found,) = await asyncio.gather(self._compute(calls), return_exceptions=True)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        if isinstance(found, Exception) and not isinstance(found, StateLost) and len(batch) > 1:
            self._alone |= {call.model_id for call in calls}
            found = StateLost(f"a batch that contained this call failed: {found}")
        # An error of the ranks applies to every call of the batch.
        outcomes = [found] * len(batch) if isinstance(found, BaseException) else found
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue  # its caller was cancelled
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def tenant_of(model_id: str) -> str:
    """Return the API key of a model, or its session in a service without keys."""
    return owner_of(model_id) or model_id.partition(":")[0]
