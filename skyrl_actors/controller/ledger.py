"""Write requests to the journal before they are accepted, and answers before they are visible.

Consumes requests from the controller and outcomes from the lanes. Produces entries of the journal.
While the journal cannot write, no request is accepted and none starts. Computed answers wait here
until they are written.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from skyrl_actors import clock
from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.operations import Op, Outcome, accepted, cost_of, storable
from skyrl_actors.controller.payloads import PayloadMemory
from skyrl_actors.controller.queue import KEPT_PER_STREAM, RequestQueue
from skyrl_actors.controller.recall import Recall
from skyrl_actors.controller.waiters import ResultTable
from skyrl_actors.journal.entries import Answered, Entry, Operation, Used
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import (
    Corrupt,
    InvalidRequest,
    SkyrlActorsError,
    Unavailable,
)
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import without_routes
from skyrl_actors.messages.sizes import size_of
from skyrl_actors.messages.usage import Usage

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0


class Meter(Protocol):
    """Admits requests, and counts what they used; `metering.Metering` implements it."""

    def admit(self, op: Op, request: Request, num_open: int) -> None: ...

    def withdraw(self, op: Op, request: Request) -> None: ...

    def used(self, op: Op, outcome: Outcome) -> Usage: ...

    def answered(self, op: Op, outcome: Outcome, usage: Usage) -> None: ...


class Ledger:
    """The open operations, and the only writer of their acceptance and their answers."""

    def __init__(
        self,
        *,
        journal: Journal,
        queue: RequestQueue,
        results: ResultTable,
        memory: PayloadMemory,
        completions: Completions,
        meter: Meter,
        wall: Callable[[], float] = clock.now,
    ):
        self.journal = journal
        self.queue = queue
        self.results = results
        self.memory = memory
        self.completions = completions
        self.meter = meter
        self.recall = Recall(journal, queue, completions)
        self.wall = wall
        self.ops: dict[str, Op] = {}
        self.next_number = 1
        # Request ids that were answered before a restart; a client may repeat them.
        self.answered_before: frozenset[str] = frozenset()
        self._answered: OrderedDict[str, None] = OrderedDict()  # the newest since the restart
        self._accepting: dict[str, asyncio.Future[None]] = {}

    async def accept(
        self,
        request: Request,
        stream: str,
        seq_id: int | None,
        model_id: str | None,
        session_id: str | None,
        *,
        digest: int = 0,
        request_id: str | None = None,
        bounded: bool = True,
    ) -> Op:
        """Accept a request durably, or raise CapacityError, Unavailable or InvalidRequest."""
        op = Op(
            number=self.next_number,
            request_id=request_id or f"r{uuid.uuid4().hex}",
            stream=stream,
            model_id=model_id,
            request=request,
            session_id=session_id,
            seq_id=seq_id,
            num_bytes=size_of(request),
            cost=cost_of(request),
        )
        owner = owner_of(op.request_id)
        if bounded:
            self.queue.check_room(owner, op.num_bytes)
            self.meter.admit(op, request, self.queue.held(owner))
        self.queue.reserve(op.request_id, stream, seq_id, digest, model_id, False, op.num_bytes)
        self.next_number += 1
        self.ops[op.request_id] = op
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepting[op.request_id] = written
        refused: SkyrlActorsError | None = Unavailable("the request was not accepted")
        try:
            await self.journal.write(accepted(op, digest, self.wall()))
            refused = None
        except (Unavailable, InvalidRequest) as error:  # the database can refuse a value
            refused = error
            raise
        finally:
            del self._accepting[op.request_id]
            if refused is None:
                self.results.open(op.request_id)
                self.queue.confirm(op.request_id)
                self.memory.keep(op)
                written.set_result(None)
            else:
                self.queue.withdraw(op.request_id, stream, seq_id, model_id)
                if bounded:
                    self.meter.withdraw(op, request)
                del self.ops[op.request_id]
                written.set_exception(refused)
                written.exception()  # marks it as retrieved, as no repeat may be waiting
        return op

    async def known(
        self, stream: str, seq_id: int | None, digest: int, request_id: str | None
    ) -> str | None:
        """Return the id of the first request with this number or id once it is durable.

        Returns None when there was none. None stays true until the caller awaits something.
        """
        if seq_id is not None:
            await self.recall.stream(stream)
        found = self.queue.known(stream, seq_id, digest)
        if found is None and request_id is not None and self.knows(request_id):
            found = request_id
        return None if found is None else await self.accepted_before(found)

    async def accepted_before(self, request_id: str) -> str:
        """Return the id once the first request with it is durable."""
        if request_id in self._accepting:
            await asyncio.shield(self._accepting[request_id])
        return request_id

    def knows(self, request_id: str) -> bool:
        return (
            request_id in self.ops
            or request_id in self._answered
            or request_id in self.answered_before
        )

    def resume(self, header: Operation, model_id: str | None) -> Op:
        """Queue an operation that was accepted before a restart and not answered."""
        num_bytes = header.payload.length if header.payload else 0
        op = Op(
            number=header.number,
            request_id=header.request_id,
            stream=header.stream,
            model_id=model_id,
            request=None,
            header=header,
            session_id=header.session_id,
            seq_id=header.seq_id,
            num_bytes=num_bytes,
        )
        self.queue.reserve(
            op.request_id, op.stream, header.seq_id, header.digest, model_id, False, num_bytes
        )
        self.queue.confirm(op.request_id)
        self.results.open(op.request_id)
        self.ops[op.request_id] = op
        return op

    async def request_of(self, op: Op) -> Request:
        """Return the request of an operation that starts, and keep it in memory until the answer.

        Retries while the journal cannot be read. Raises Corrupt.
        """
        while True:
            try:
                await self.memory.start(op)
                return await self._read_request(op)
            except Unavailable as error:
                log.warning("operation %d waits for the journal: %s", op.number, error)
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _read_request(self, op: Op) -> Request:
        if op.request is None:
            op.header = op.header or await self.journal.find(op.request_id)
            if op.header is None:
                raise Corrupt(f"operation {op.number} is not in the journal")
            op.request = await self.journal.request(op.header)
        return op.request

    async def answer(self, op: Op, outcome: Outcome, step: int | None = None) -> None:
        """Make an answer durable, then visible. Waits while the journal cannot write."""
        outcome = storable(outcome)
        answered = Answered(
            number=op.number,
            request_id=op.request_id,
            result=outcome.result,
            effect=outcome.effect,
            answered_at=self.wall(),
            step=step,
        )
        usage = self.meter.used(op, outcome)
        await self.write_until_stored(answered, Used(usage), *outcome.entries)
        self.meter.answered(op, outcome, usage)
        del self.ops[op.request_id]
        self._answered[op.request_id] = None
        if len(self._answered) > KEPT_PER_STREAM:
            self._answered.popitem(last=False)
        self.memory.end(op.request_id)
        self.queue.finish(op.request_id, op.model_id)
        self.results.resolve(op.request_id, without_routes(outcome.result))

    async def write_until_stored(
        self, *entries: Entry, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Write entries to the journal, and retry for as long as it cannot write.

        Returns False if `unless` became true before an attempt, so that they are not written.
        """
        pause_s = FIRST_PAUSE_S
        while not unless():
            try:
                await self.journal.write(*entries)
                return True
            except Unavailable as error:
                # No event reports that a disk has space again, so the write is retried.
                log.warning("waiting for the journal: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return False
