"""What is written to a journal, and what is read back (pure, frozen).

`Entry` values given to one `write` become durable together or not at all.
"""

from dataclasses import dataclass
from typing import Literal

from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Failure, Result
from skyrl_actors.messages.weights import SamplerWeights

Effect = Literal["applied", "dropped", "none"]
"""What an answered operation did to its model's state, and so what a replay does: run it again, drop the pending
gradients, or nothing."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that was promised. `number` orders all of them; `session_id` None is a sampler of nobody's session."""

    number: int
    request_id: str
    stream: str
    seq_id: int | None
    digest: int
    model_id: str | None
    session_id: str | None
    accepted_at: float  # wall clock, seconds since the epoch; never used for order
    request: Request


@dataclass(frozen=True, slots=True)
class Answered:
    number: int
    request_id: str
    result: Result
    effect: Effect
    answered_at: float
    step: int | None = None  # of the model, after this operation; None for operations that train nothing

    @property
    def failed(self) -> bool:
        return isinstance(self.result, Failure)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session_id: str
    user_metadata: dict[str, str]
    opened_at: float


@dataclass(frozen=True, slots=True)
class SessionEnded:
    session_id: str
    ended_at: float


@dataclass(frozen=True, slots=True)
class SamplerOpened:
    """`owner` and `number`: the model whose unnamed version it is, and the operation that froze it."""

    sampler_id: str
    session_id: str | None
    base_model: str
    model_path: str | None
    weights: SamplerWeights
    owner: str | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class SamplerRetired:
    sampler_id: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The whole state of a model behind operation `number`."""

    model_id: str
    number: int
    step: int
    folder: str  # its name below the journal's snapshots
    num_bytes: int
    taken_at: float


@dataclass(frozen=True, slots=True)
class SnapshotDropped:
    model_id: str
    number: int


Entry = Accepted | Answered | SessionOpened | SessionEnded | SamplerOpened | SamplerRetired | SnapshotTaken | SnapshotDropped


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes within a pack file. `digest` is the SHA-256 of these bytes."""

    pack: str
    offset: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Operation:
    """The header of an operation; its payload and result are read when they are needed."""

    number: int
    request_id: str
    kind: str  # the Request's class name
    stream: str
    seq_id: int | None
    digest: int
    model_id: str | None
    session_id: str | None
    accepted_at: float
    payload: Blob | None = None  # None when it was swept
    answered_at: float | None = None
    effect: Effect | None = None
    failed: bool = False
    step: int | None = None
    result: Blob | None = None


@dataclass(frozen=True, slots=True)
class Books:
    """What a controller needs to go on. `epoch` counts the openings: a higher one fences off all before."""

    epoch: int
    next_number: int
    sessions: tuple[SessionOpened, ...] = ()
    samplers: tuple[SamplerOpened, ...] = ()
    operations: tuple[Operation, ...] = ()  # not answered, or saying what a living model's state is; by number
    snapshots: tuple[SnapshotTaken, ...] = ()  # the newest of each living model
    recent: frozenset[str] = frozenset()  # ids of the requests that were answered last
