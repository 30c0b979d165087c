"""Entries for training runs, checkpoints and sessions, which outlive the session (frozen)."""

from dataclasses import dataclass, field
from typing import Literal

LONGEST_TTL_S = 100 * 365 * 24 * 3600  # of a checkpoint; dates can represent far more
PROJECT = "local"  # of sessions that name none
SessionVerb = Literal["sessions", "session"]
CatalogVerb = Literal[
    "runs",
    "run",
    "checkpoints",
    "is_public",
    "copy",
    "set_public",
    "set_ttl",
    "delete",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A saved checkpoint. Times are seconds since the epoch.

    `expires_at` None: the checkpoint stays until it is deleted.
    """

    run_id: str
    kind: str  # weights, sampler_weights or external_weights
    name: str
    time: float
    num_bytes: int
    public: bool = False
    expires_at: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    copied_from: str | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A training run, which is a model: its id is the model's."""

    run_id: str
    session_id: str
    base_model: str
    lora_rank: int | None
    created_at: float
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    checkpoints: tuple[CheckpointEntry, ...] = ()  # newest first

    @property
    def last_time(self) -> float:
        return max([self.created_at, *(checkpoint.time for checkpoint in self.checkpoints)])

    def last(self, kind: str) -> CheckpointEntry | None:
        return next(
            (checkpoint for checkpoint in self.checkpoints if checkpoint.kind == kind), None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLabels:
    """The data that a client gives for its session, to show and search it."""

    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    display_name: str | None = None
    tags: list[str] = field(default_factory=list[str])
    project_id: str = PROJECT


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNote(SessionLabels):
    """The record of a session: its labels, when it was opened, and how it ended."""

    session_id: str
    created_at: float  # seconds since the epoch
    # success, errored or interrupted, as given by the client; None: the client gave none
    finished: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEntry:
    """A session with its runs, open samplers and checkpoints."""

    note: SessionNote
    status: str | None  # active, or how it finished; None: its heartbeat stopped
    run_ids: tuple[str, ...]
    sampler_ids: tuple[str, ...]  # of the open ones
    num_checkpoints: int
    num_bytes: int
