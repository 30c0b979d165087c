"""Which calls of forward_backward go to the ranks together: those that came while one was being computed."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.results import LossOutput
from skyrl_actors.messages.turn import Turn


@dataclass(frozen=True, slots=True)
class Call:
    model_id: str
    turn: Turn
    columns: Columns
    loss: LossCall | None
    forward_only: bool


Compute = Callable[[Sequence[Call]], Awaitable[Sequence[LossOutput | BaseException]]]


class Together:
    """At most one batch is on its way. Oldest first; up to `limit_tokens` in a batch, one larger call alone.

    When a batch of several breaks off, nobody knows by whose fault: each is asked again, and then goes alone.
    """

    def __init__(self, compute: Compute, limit_tokens: int):
        self._compute = compute
        self._limit = limit_tokens
        self._alone: set[str] = set()  # models that were in a batch that broke off
        self._waiting: deque[tuple[Call, asyncio.Future[LossOutput]]] = deque()
        self._flight: asyncio.Task[None] | None = None

    async def run(self, call: Call) -> LossOutput:
        future: asyncio.Future[LossOutput] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if self._flight is None:
            self._flight = asyncio.create_task(self._fly())
        return await future

    async def _fly(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # those that come in the same moment come along
                await self._run_batch(self._next_batch())
        finally:
            self._flight = None

    def _next_batch(self) -> list[tuple[Call, "asyncio.Future[LossOutput]"]]:
        batch = [self._waiting.popleft()]
        size = batch[0][0].columns.num_tokens
        if batch[0][0].model_id in self._alone:
            self._alone.discard(batch[0][0].model_id)
            return batch
        while self._waiting:
            call = self._waiting[0][0]
            size += call.columns.num_tokens
            if call.forward_only != batch[0][0].forward_only or size > self._limit or call.model_id in self._alone:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _run_batch(self, batch: "Sequence[tuple[Call, asyncio.Future[LossOutput]]]") -> None:
        futures = [future for _, future in batch]
        try:
            (found,) = await asyncio.gather(self._compute([call for call, _ in batch]), return_exceptions=True)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        if isinstance(found, Exception) and not isinstance(found, StateLost) and len(batch) > 1:
            self._alone |= {call.model_id for call, _ in batch}
            found = StateLost(f"it was computed together with others, and that broke off: {found}")
        # What befell the ranks befell each of these calls.
        outcomes = [found] * len(batch) if isinstance(found, BaseException) else found
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue  # nobody waits for it any more
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
