"""Batch forward-backward calls: calls that arrive during a computation form the next batch."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.results import LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model, with its input and its loss."""

    model_id: str
    precondition: OpPrecondition
    columns: Columns
    loss: LossCall | None
    forward_only: bool


Compute = Callable[[Sequence[Call]], Awaitable[Sequence[LossOutput | BaseException]]]


class Batcher:
    """Run batches of calls one at a time, oldest call first.

    A batch holds up to `limit_tokens`; a larger call runs alone. When a batch of several calls
    fails, the faulty call is unknown. So each call fails with StateLost, and its retry runs alone.
    """

    def __init__(self, compute: Compute, limit_tokens: int):
        self._compute = compute
        self._limit = limit_tokens
        # Models of failed batches; their next calls run alone.
        self._alone: set[str] = set()
        self._waiting: deque[tuple[Call, asyncio.Future[LossOutput]]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def run(self, call: Call) -> LossOutput:
        """Queue the call, and return its result after its batch is computed."""
        future: asyncio.Future[LossOutput] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if self._running is None:
            self._running = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        try:
            while self._waiting:
                # Let calls that were submitted together join the batch.
                await asyncio.sleep(0)
                await self._run_batch(self._next_batch())
        finally:
            self._running = None

    def _next_batch(self) -> list[tuple[Call, "asyncio.Future[LossOutput]"]]:
        batch = [self._waiting.popleft()]
        size = batch[0][0].columns.num_tokens
        if batch[0][0].model_id in self._alone:
            self._alone.discard(batch[0][0].model_id)
            return batch
        while self._waiting:
            call = self._waiting[0][0]
            size += call.columns.num_tokens
            if (
                call.forward_only != batch[0][0].forward_only
                or size > self._limit
                or call.model_id in self._alone
            ):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _run_batch(self, batch: "Sequence[tuple[Call, asyncio.Future[LossOutput]]]") -> None:
        futures = [future for _, future in batch]
        try:
            (found,) = await asyncio.gather(
                self._compute([call for call, _ in batch]), return_exceptions=True
            )
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        if isinstance(found, Exception) and not isinstance(found, StateLost) and len(batch) > 1:
            self._alone |= {call.model_id for call, _ in batch}
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
