"""Types that are written to a journal and read from it (pure, frozen).

`Entry` values of one `write` become durable together or not at all.
"""

from dataclasses import dataclass
from typing import Literal

from skyrl_actors.messages.keys import AuditEntry, StoredKey
from skyrl_actors.messages.operating import Mode
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Failure, Result
from skyrl_actors.messages.usage import OwnerQuota, Usage
from skyrl_actors.messages.weights import SamplerWeights

Effect = Literal["applied", "dropped", "none"]
"""What an answered operation did to its model's state, and so what a replay does.

applied: repeat the operation. dropped: drop the pending gradients. none: do nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An accepted request.

    `number` orders all requests. `session_id` None: the sampler belongs to no session.
    """

    number: int
    request_id: str
    stream: str
    seq_id: int | None
    digest: int
    model_id: str | None
    session_id: str | None
    accepted_at: float  # wall clock, seconds since the epoch; never used for order
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The result of a request, and its effect on the model."""

    number: int
    request_id: str
    result: Result
    effect: Effect
    answered_at: float
    step: int | None = None  # of the model after this operation; None if it trains nothing

    @property
    def failed(self) -> bool:
        return isinstance(self.result, Failure)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session that a client opened. Its time is in seconds since the epoch."""

    session_id: str
    user_metadata: dict[str, str]
    opened_at: float


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session that has ended. Its time is in seconds since the epoch."""

    session_id: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOpened:
    """A sampler with its weights.

    For an unnamed version, `owner` is its model and `number` the operation that saved it.
    """

    sampler_id: str
    session_id: str | None
    base_model: str
    model_path: str | None
    weights: SamplerWeights
    owner: str | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class SamplerRetired:
    """A sampler that was closed."""

    sampler_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken:
    """The whole state of a model after operation `number`."""

    model_id: str
    number: int
    step: int
    folder: str  # its name below the journal's snapshots
    num_bytes: int
    taken_at: float


@dataclass(frozen=True, slots=True)
class SnapshotDropped:
    """A snapshot that retention removes. Its row goes first, then its folder."""

    model_id: str
    number: int


@dataclass(frozen=True, slots=True)
class KeyStored:
    """An API key that was added or changed."""

    key: StoredKey


@dataclass(frozen=True, slots=True)
class Audited:
    """An administrative act."""

    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """The limits of an owner from now on."""

    quota: OwnerQuota


@dataclass(frozen=True, slots=True)
class ModeSet:
    """What the service does with requests from now on."""

    mode: Mode


@dataclass(frozen=True, slots=True)
class Used:
    """What an answered request used. It is added to the session's total of the hour."""

    usage: Usage


Entry = (
    Accepted
    | Answered
    | SessionOpened
    | SessionEnded
    | SamplerOpened
    | SamplerRetired
    | SnapshotTaken
    | SnapshotDropped
    | KeyStored
    | Audited
    | QuotaSet
    | ModeSet
    | Used
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes in a pack file. `digest` is their SHA-256."""

    pack: str
    offset: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The header of an operation. Payload and result are read when they are needed."""

    number: int
    request_id: str
    kind: str  # the Request's class name
    stream: str
    seq_id: int | None
    digest: int
    model_id: str | None
    session_id: str | None
    accepted_at: float
    payload: Blob | None = None  # None after a sweep
    answered_at: float | None = None
    effect: Effect | None = None
    failed: bool = False
    step: int | None = None
    result: Blob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """The state from which a controller resumes.

    `epoch` counts the openings. A higher one fences off all earlier controllers.
    """

    epoch: int
    next_number: int
    sessions: tuple[SessionOpened, ...] = ()
    samplers: tuple[SamplerOpened, ...] = ()
    # by number; unanswered, or needed to rebuild the state of a living model
    operations: tuple[Operation, ...] = ()
    snapshots: tuple[SnapshotTaken, ...] = ()  # the newest of each living model
    keys: tuple[StoredKey, ...] = ()
    quotas: tuple[OwnerQuota, ...] = ()
    mode: Mode = "running"
    recent: frozenset[str] = frozenset()  # ids of the last answered requests
