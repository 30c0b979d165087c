"""Accepted requests and their outcomes, as lanes, samples and the ledger pass them on."""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from skyrl_actors.controller.quotas import NOTHING, Reserved
from skyrl_actors.journal import encoding
from skyrl_actors.journal.entries import Accepted, Effect, Entry, Operation
from skyrl_actors.messages.errors import (
    InternalError,
    InvalidRequest,
    SkyrlActorsError,
    UserError,
)
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import Request, Sample
from skyrl_actors.messages.results import Failure, Result

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Op:
    """An accepted request that is not answered.

    `request` is None while it is in the journal only; it is read when it runs.
    """

    number: int
    request_id: str
    stream: str
    model_id: str | None  # the model in whose queue it is; None for a sample
    request: Request | None
    header: Operation | None = None
    session_id: str | None = None
    seq_id: int | None = None  # the client's sequence number within the stream
    after: int = -1  # the operation whose state this one runs on; set when it runs
    accepted: float = field(default_factory=time.monotonic)  # after a restart: when it was resumed
    begun: float | None = None  # when it started, on the same clock
    num_bytes: int = 0  # size of the payload
    cancelled: str | None = None  # why it fails instead of running
    base_model: str = ""  # set when it runs
    streamed: int = 0  # tokens of a sample that its client has read before the answer
    # Sequences and maximum tokens of a sample. After a restart the request is not read, so (1, 1).
    cost: tuple[int, int] = (1, 1)
    reserved: Reserved = NOTHING  # of its API key's tokens of the day, until it is answered

    @property
    def kind(self) -> str | None:
        """The name of the request's class, or None when the journal has lost the request."""
        if self.request is not None:
            return type(self.request).__name__
        return self.header.kind if self.header else None

    @property
    def precondition(self) -> OpPrecondition:
        return OpPrecondition(self.number, self.after, self.request_id)

    @property
    def reading(self) -> OpPrecondition:
        """The precondition of a verb that does not change the state."""
        return OpPrecondition(None, self.after, self.request_id)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an operation. `entries` become durable together with the answer."""

    result: Result
    effect: Effect = "none"
    entries: tuple[Entry, ...] = ()


def cost_of(request: Request) -> tuple[int, int]:
    """Return the sequences and the maximum tokens of a sample, (1, 1) for other requests."""
    if not isinstance(request, Sample):
        return 1, 1
    params = request.params
    return params.num_samples, len(request.prompt) + params.num_samples * params.max_tokens


def accepted(op: Op, digest: int, at: float) -> Accepted:
    """Return the journal's entry of a new operation."""
    assert op.request is not None
    return Accepted(
        number=op.number,
        request_id=op.request_id,
        stream=op.stream,
        seq_id=op.seq_id,
        digest=int(digest),
        model_id=op.model_id,
        session_id=op.session_id,
        accepted_at=at,
        request=op.request,
    )


def storable(outcome: Outcome) -> Outcome:
    """Replace an answer that cannot be stored by a failure. Its effect on the model stays."""
    try:
        encoding.check(outcome.result)
        return outcome
    except InvalidRequest as error:
        log.error("an answer cannot be stored: %s", error)
        return replace(
            outcome, result=Failure.of(InternalError(f"the answer cannot be stored: {error}"))
        )


# Other exceptions without the base Exception, such as a panic of a library in Rust, are faults.
PASSED_ON = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


def failed(op: Op, error: BaseException) -> Outcome:
    """Return the outcome of a fault, and log one that is not the client's."""
    if not isinstance(error, UserError):
        log.error(
            "request %s failed: %s",
            op.request_id,
            error,
            exc_info=not isinstance(error, SkyrlActorsError),
        )
    return Outcome(Failure.of(error))
