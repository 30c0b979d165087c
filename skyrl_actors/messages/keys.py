"""API keys that are kept in the journal, as hashes."""

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["tenant", "read_only", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
Act = Literal[
    "add",
    "revoke",
    "rotate",
    "limit",
    "end",
    "cancel",
    "pause",
    "drain",
    "resume",
    "publish",
    "unpublish",
    "read",
    "delete",
    "expire",
    "unload",
]
"""Acts on keys, sessions, requests, models and the service, and access to checkpoints."""
ACCESSES: tuple[Act, ...] = ("publish", "unpublish", "read")


def id_of(digest: str) -> str:
    """Return the first digits of a hash, which name its key."""
    return digest.removeprefix("sha256:")[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """An API key. Its name decides the owner; keys of one name share what they create.

    Times are seconds since the epoch.
    """

    digest: str  # `sha256:<hex>` of the key
    name: str
    role: Role
    created_at: float
    expires_at: float | None = None  # None: it does not expire
    revoked_at: float | None = None

    @property
    def key_id(self) -> str:
        """What names the key in lists and commands."""
        return id_of(self.digest)

    def is_valid(self, now: float) -> bool:
        """Return whether the key is accepted at this time."""
        is_expired = self.expires_at is not None and now >= self.expires_at
        return self.revoked_at is None and not is_expired


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """All stored keys. Tables with the same `version` are equal."""

    version: str
    keys: tuple[StoredKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An administrative act."""

    at: float  # seconds since the epoch
    actor: str  # the user and host of a command, or the name of a key
    act: Act
    subject: str  # what was changed, for example the name and id of a key
