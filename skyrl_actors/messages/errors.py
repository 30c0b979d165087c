"""The package's errors, which cross process boundaries: all of them can be pickled.

SkyrlActorsError
├── UserError             the request cannot be served as it is; the message states what is allowed
│   ├── InvalidRequest    a field is missing, mismatched, out of range or unknown
│   ├── NotFound          an id or a tinker path that does not exist
│   ├── Conflict          a sequence number used with another body, or a name that is taken
│   └── CapacityError     a limit is reached; free an object or raise the limit in the config
├── ConfigError           found before any process starts
└── InternalError         a fault of the service or the machine; the request itself was valid
    ├── StateLost         the ranks that held a model's state died, hang, or stopped half-way:
    │   │                 restore the state and repeat the request
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

    `category` and `status` tell clients who is at fault, over HTTP too.
    """

    category: Category = "server"
    status: int = 500


class UserError(SkyrlActorsError):
    category: Category = "user"
    status = 400


class InvalidRequest(UserError):
    status = 422


class NotFound(UserError):
    status = 404


class Conflict(UserError):
    status = 409


class CapacityError(UserError):
    status = 429


class ConfigError(SkyrlActorsError):
    category: Category = "user"
    status = 400


class InternalError(SkyrlActorsError):
    pass


class StateLost(InternalError):
    pass


class CollectiveFailed(StateLost):
    pass


class PartDown(StateLost):
    """A part is being restarted. This does not count as an attempt of the request."""


class WeightsGone(InternalError):
    pass


class Unavailable(InternalError):
    status = 503


class Corrupt(InternalError):
    pass
