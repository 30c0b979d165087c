"""What operators see of a running service and do to it."""

from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["running", "paused", "draining"]
"""running: as usual. paused: requests are accepted, and none is started. draining: accepted
requests are completed, and no new one is accepted."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """An accepted request without an answer."""

    request_id: str
    kind: str  # the Request's class name
    target: str  # the id of its model or sampler
    owner: str  # "" without API keys
    is_running: bool
    age_s: float  # since it was accepted, or since the controller's restart
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request whose answer is a failure."""

    at: float  # seconds since the epoch
    request_id: str
    kind: str
    target: str
    owner: str
    category: str  # user: the request was at fault; server: the service
    message: str  # its first line


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """Totals since the controller's start, at a time in seconds since the epoch."""

    at: float
    trained_tokens: float
    sampled_tokens: float
    failed: int
    open_requests: int
