"""Promises kept: a request's id is given when the request is durable, its answer is shown when the answer is.

Consumes requests from the controller and outcomes from the lanes. Produces entries of the journal. While the journal can
not write, nothing is promised and nothing new is run; what was computed waits here to be written.
"""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from skyrl_actors import clock
from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.payloads import PayloadMemory
from skyrl_actors.controller.queue import REMEMBERED, RequestQueue
from skyrl_actors.controller.recall import Recall
from skyrl_actors.controller.waiters import ResultTable
from skyrl_actors.journal import encoding
from skyrl_actors.journal.base import Journal
from skyrl_actors.journal.entries import Accepted, Answered, Effect, Entry, Operation
from skyrl_actors.messages.errors import Corrupt, InternalError, InvalidRequest, SkyrlActorsError, Unavailable
from skyrl_actors.messages.requests import Request, Sample
from skyrl_actors.messages.results import Failure, Result
from skyrl_actors.messages.sizes import size_of
from skyrl_actors.messages.turn import Turn

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0


@dataclass(slots=True)
class Op:
    """An accepted request on its way. `request` None: it is in the journal only, and read when it is wanted."""

    number: int
    request_id: str
    stream: str
    line: str | None  # the model whose order it keeps
    request: Request | None
    header: Operation | None = None
    seq_id: int | None = None  # of its client, within the stream
    after: int = -1  # the operation whose state it is run on; set when it is run
    accepted: float = field(default_factory=time.monotonic)  # after a restart: when it was taken up
    begun: float | None = None  # when its turn came, on the same clock
    num_bytes: int = 0  # of the payload in memory
    cost: tuple[int, int] = (1, 1)  # of a sample: sequences, and tokens at most; of one read after a restart the least

    @property
    def turn(self) -> Turn:
        return Turn(self.number, self.after, self.request_id)

    @property
    def reading(self) -> Turn:
        """For verbs that leave the state as it is."""
        return Turn(None, self.after, self.request_id)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation came to. `entries` become durable with the answer."""

    result: Result
    effect: Effect = "none"
    entries: tuple[Entry, ...] = ()


def cost_of(request: Request) -> tuple[int, int]:
    if not isinstance(request, Sample):
        return 1, 1
    params = request.params
    return params.num_samples, len(request.prompt) + params.num_samples * params.max_tokens


class Ledger:
    def __init__(
        self,
        *,
        journal: Journal,
        queue: RequestQueue,
        results: ResultTable,
        memory: PayloadMemory,
        completions: Completions,
        wall: Callable[[], float] = clock.now,
    ):
        self.journal = journal
        self.queue = queue
        self.results = results
        self.memory = memory
        self.recall = Recall(journal, queue, completions)
        self.wall = wall
        self.ops: dict[str, Op] = {}
        self.next_number = 1
        self.answered_before: frozenset[str] = frozenset()  # before a restart; a client may still ask for one again
        self._answered: OrderedDict[str, None] = OrderedDict()  # since then, the newest
        self._accepting: dict[str, asyncio.Future[None]] = {}

    async def accept(
        self,
        request: Request,
        stream: str,
        seq_id: int | None,
        line: str | None,
        session_id: str | None,
        *,
        digest: int = 0,
        request_id: str | None = None,
        bounded: bool = True,
    ) -> Op:
        """Durable when this returns. Raises CapacityError, InvalidRequest (a value that the database refuses) or
        Unavailable, then it was not accepted."""
        op = Op(
            self.next_number,
            request_id or f"r{uuid.uuid4().hex}",
            stream,
            line,
            request,
            seq_id=seq_id,
            num_bytes=size_of(request),
            cost=cost_of(request),
        )
        self.queue.reserve(op.request_id, stream, seq_id, digest, line, bounded, op.num_bytes)
        self.next_number += 1
        self.ops[op.request_id] = op
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepting[op.request_id] = written
        refused: SkyrlActorsError | None = Unavailable("the request was not accepted")
        try:
            await self.journal.write(
                Accepted(op.number, op.request_id, stream, seq_id, int(digest), line, session_id, self.wall(), request)
            )
            refused = None
        except (Unavailable, InvalidRequest) as error:
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
                self.queue.withdraw(op.request_id, stream, seq_id, line)
                del self.ops[op.request_id]
                written.set_exception(refused)
                written.exception()  # nobody may be waiting for it
        return op

    async def known(self, stream: str, seq_id: int | None, digest: int, request_id: str | None) -> str | None:
        """The id of the first request with this number or id, when it is durable; None when there was none. When nothing
        was awaited since it was None, it still is."""
        if seq_id is not None:
            await self.recall.stream(stream)
        found = self.queue.known(stream, seq_id, digest)
        if found is None and request_id is not None and self.knows(request_id):
            found = request_id
        return None if found is None else await self.accepted_before(found)

    async def accepted_before(self, request_id: str) -> str:
        """A repeat of a request that is just being written waits with it."""
        if request_id in self._accepting:
            await asyncio.shield(self._accepting[request_id])
        return request_id

    def knows(self, request_id: str) -> bool:
        return request_id in self.ops or request_id in self._answered or request_id in self.answered_before

    def take_up(self, header: Operation, line: str | None) -> Op:
        """An operation that was promised before a restart and not answered."""
        num_bytes = header.payload.length if header.payload else 0
        op = Op(
            header.number,
            header.request_id,
            header.stream,
            line,
            None,
            header,
            seq_id=header.seq_id,
            num_bytes=num_bytes,
        )
        self.queue.reserve(op.request_id, op.stream, header.seq_id, header.digest, line, False, num_bytes)
        self.queue.confirm(op.request_id)
        self.results.open(op.request_id)
        self.ops[op.request_id] = op
        return op

    async def request_of(self, op: Op) -> Request:
        """For an operation that starts: its request stays in memory until it is answered. Raises Unavailable or Corrupt."""
        await self.memory.start(op)
        if op.request is None:
            op.header = op.header or await self.journal.find(op.request_id)
            if op.header is None:
                raise Corrupt(f"operation {op.number} is not in the journal")
            op.request = await self.journal.request(op.header)
        return op.request

    async def answer(self, op: Op, outcome: Outcome, step: int | None = None) -> None:
        """Durable, then visible. Waits as long as the journal can not write."""
        outcome = _storable(outcome)
        answered = Answered(op.number, op.request_id, outcome.result, outcome.effect, self.wall(), step)
        await self.insist(answered, *outcome.entries)
        del self.ops[op.request_id]
        self._answered[op.request_id] = None
        if len(self._answered) > REMEMBERED:
            self._answered.popitem(last=False)
        self.memory.end(op.request_id)
        self.queue.finish(op.request_id, op.line)
        self.results.resolve(op.request_id, outcome.result)

    async def insist(self, *entries: Entry) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.journal.write(*entries)
                return
            except Unavailable as error:
                # Nothing tells when a disk has room again: it must be tried.
                log.warning("waiting for the journal: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _storable(outcome: Outcome) -> Outcome:
    """An answer that cannot be stored becomes a failure that can; what was done to the model stays done."""
    try:
        encoding.check(outcome.result)
        return outcome
    except InvalidRequest as error:
        log.error("an answer cannot be stored: %s", error)
        return replace(outcome, result=Failure.of(InternalError(f"the answer cannot be stored: {error}")))
