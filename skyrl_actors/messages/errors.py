"""What may go wrong, as types that cross every hop (all of them pickle).

SkyrlActorsError
├── UserError             the request can not be served as it is; the message says what is allowed
│   ├── InvalidRequest    a field is missing, mismatched, out of range or unknown
│   ├── NotFound          an id or a tinker path that does not exist
│   ├── Conflict          the same sequence number with another body, or a name that is taken
│   └── CapacityError     no room for one more of these; free one or raise the limit in the config
├── ConfigError           found before any process starts
└── InternalError         our fault or the machine's; the request itself was right
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
