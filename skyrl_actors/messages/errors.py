"""What may go wrong, as types that cross every hop (all of them pickle).

SkyrlActorsError
├── UserError             the request can not be served as it is; the message says what is allowed
│   ├── InvalidRequest    a field is missing, mismatched, out of range or unknown
│   ├── NotFound          an id or a tinker path that does not exist
│   ├── Conflict          the same sequence number with another body, or a name that is taken
│   └── CapacityError     no room for one more of these; free one or raise the limit in the config
├── ConfigError           found before any process starts
└── InternalError         our fault or the machine's; the request itself was right
    ├── StateLost         the ranks that held a model's state died, hang, or stopped half-way: restore it and ask again
    │   ├── CollectiveFailed   the ranks can not reach each other any more: they must be made anew
    │   └── PartDown           the part that the work needs is being made anew, for no fault of this work: ask again when it is up
    ├── WeightsGone       a version that was not written, and is no model's weights any more: compute it anew and ask again
    ├── Unavailable       passing: the journal can not write, a part restarts; the same request later is right
    └── Corrupt           a file is missing or not what was written
"""

from typing import Literal

Category = Literal["user", "server"]


class SkyrlActorsError(Exception):
    """Base of every error this package raises on purpose. `category` and `status` say who is at fault, over HTTP too."""

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
    """It does not count among the attempts of what asked."""


class WeightsGone(InternalError):
    pass


class Unavailable(InternalError):
    status = 503


class Corrupt(InternalError):
    pass
