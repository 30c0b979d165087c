"""The package's errors, which cross process boundaries: all of them can be pickled.

SkyrlActorsError
├── UserError             the request cannot be served as it is; the message states what is allowed
│   ├── InvalidRequest    a field is missing, mismatched, out of range or unknown
│   ├── NotFound          an id or a tinker path that does not exist
│   ├── Conflict          a sequence number used with another body, or a name that is taken
│   ├── CapacityError     a limit is reached; free an object or raise the limit in the config
│   └── QuotaUsed         the API key has used what it may use in this period
├── ConfigError           a setting or an argument that cannot work, found before work begins
└── InternalError         a fault of the service or the machine; the request itself was valid
    ├── StateLost         ranks that held a model's state, or an engine, died, hang or stopped
    │   │                 half-way: restore the state and repeat the request
    │   ├── CollectiveFailed   the ranks cannot communicate any more and must be restarted
    │   └── PartDown           a part that the work needs is being restarted, for another reason:
    │                          repeat the request when it is up
    ├── WeightsGone       a version that was not written, and no longer equals live weights:
    │                     recompute it and repeat the request
    ├── Unavailable       temporary: the journal cannot be written, or a part restarts;
    │                     the same request succeeds later
    └── Corrupt           a file is missing or has changed since it was written
"""

from typing import Literal

Category = Literal["user", "server"]


class SkyrlActorsError(Exception):
    """Base of all errors that this package raises on purpose.

    `category` tells clients who is at fault. `status` is the HTTP status of user errors; all
    others are answered with 503, which SDKs retry.
    """

    category: Category = "server"
    status: int = 500


class UserError(SkyrlActorsError):
    """The request cannot be served as it is."""

    category: Category = "user"
    status = 400


class InvalidRequest(UserError):
    """A field is missing, mismatched, out of range or unknown."""

    status = 422


class NotFound(UserError):
    """An id or a tinker path does not exist."""

    status = 404


class Conflict(UserError):
    """A sequence number was used with another body, or a name is taken."""

    status = 409


class CapacityError(UserError):
    """A limit is reached. The request can succeed after something is freed."""

    status = 429


class QuotaUsed(UserError):
    """The API key has used what it may use in this period. SDKs pause for up to an hour."""

    status = 402


class ConfigError(SkyrlActorsError):
    """A config, its base model or an argument of a command cannot be used."""

    category: Category = "user"
    status = 400


class InternalError(SkyrlActorsError):
    """A fault of the service or the machine. The request itself was valid."""


class StateLost(InternalError):
    """Processes died, hang or stopped halfway. The state that they held must be restored."""


class CollectiveFailed(StateLost):
    """Ranks cannot communicate any more. Their group must restart."""


class PartDown(StateLost):
    """A part is being restarted. This does not count as an attempt of the request."""


class WeightsGone(InternalError):
    """An unwritten version no longer equals the live weights. It must be recomputed."""


class Unavailable(InternalError):
    """A temporary fault. The same request succeeds later."""

    status = 503


class Corrupt(InternalError):
    """A file is missing, or has changed since it was written."""
