"""API keys of a service, which are kept as hashes only.

Neither a config on disk nor the memory of a process contains a key. An entry is `key`, `name=key`,
`sha256:<hex>` or `name=sha256:<hex>`. Each entry defines an owner. With a name, the owner stays the
same when the key is replaced.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=[?&]password=)[^&;\s]+")
HASH = re.compile(r"sha256:[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SHORTEST = 8
OWNER_DIGITS = 10


@dataclass(frozen=True, slots=True)
class KnownKey:
    """An API key that the service accepts, by owner and hash."""

    owner: str  # hexadecimal; part of the id of everything that this owner creates
    digest: str


def masked(text: str) -> str:
    """Return the text without user names and passwords in URLs, for files that others read."""
    return IN_URL.sub("***", text)


def digest_of(key: str) -> str:
    """Return the hash of a key as config entries have it: `sha256:<hex>`."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def hashed(entry: str) -> str:
    """Return the entry with its key hashed.

    Raises:
        ValueError: The entry is not valid. The message does not contain the key.
    """
    name, _, rest = entry.strip().rpartition("=")
    if not HASH.fullmatch(rest):
        if len(rest) < SHORTEST or not rest.isprintable() or " " in rest:
            raise ValueError(
                f"an API key has at least {SHORTEST} characters and no spaces; "
                "SDKs require that it begins with tml-"
            )
        rest = digest_of(rest)
    if name and not NAME.fullmatch(name):
        raise ValueError(
            f"the name of an API key is {name[:64]!r}; use 1 to 64 of the characters A-Z a-z 0-9 _ "
            ". -, and a letter or digit first"
        )
    return f"{name}={rest}" if name else rest


def known_keys(entries: Iterable[str]) -> tuple[KnownKey, ...]:
    """Return owner and hash of each hashed entry."""
    return tuple(
        KnownKey(owner_of_name(name, digest), digest) for name, digest in map(entry_parts, entries)
    )


def entry_parts(entry: str) -> tuple[str, str]:
    """Return name and hash of a hashed entry."""
    name, _, digest = entry.rpartition("=")
    return name, digest


def owner_of_name(name: str, digest: str) -> str:
    """Return the owner of a key with this name, or without a name, of this hash."""
    return hashlib.sha256((name or digest).encode()).hexdigest()[:OWNER_DIGITS]


def left_out(running: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Return names, or hashes, of the running config's entries whose keys another config lacks."""
    kept = {entry_parts(entry)[1] for entry in wanted}
    parts = map(entry_parts, running)
    return [name or digest[:17] for name, digest in parts if digest not in kept]


def is_of(name: str, owner: str | None) -> bool:
    """Return whether a key with this name, or an owner itself, is of the owner; of None all are."""
    return owner is None or owner in (name, owner_of_name(name, ""))


def entries_in(text: str) -> list[str]:
    """Return the entries of a key file, which has one entry on each line and comments after `#`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
