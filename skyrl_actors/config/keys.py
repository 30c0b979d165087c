"""API keys as a service keeps them: only hashes, so that neither a config on disk nor a process's memory gives a key away.

An entry is `key`, `name=key`, `sha256:<hex>` or `name=sha256:<hex>`. Who holds a key is its owner: with a name the owner stays
the same when the key is replaced.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
HASH = re.compile(r"sha256:[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SHORTEST = 8
OWNER_DIGITS = 10


@dataclass(frozen=True, slots=True)
class KnownKey:
    owner: str  # hex; part of every id that is made for its holder
    digest: str


def masked(text: str) -> str:
    """Without user names and passwords of addresses: what is written into files that are handed on."""
    return IN_URL.sub("***", text)


def digest_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def hashed(entry: str) -> str:
    """The entry without its secret. Raises ValueError, which does not repeat the entry."""
    name, _, rest = entry.strip().rpartition("=")
    if not HASH.fullmatch(rest):
        if len(rest) < SHORTEST or not rest.isprintable() or " " in rest:
            raise ValueError(f"an API key has at least {SHORTEST} characters and no spaces; SDKs want it to begin with tml-")
        rest = digest_of(rest)
    if name and not NAME.fullmatch(name):
        raise ValueError(f"the name of an API key, {name[:64]!r}: use up to 64 of A-Z a-z 0-9 _ . -")
    return f"{name}={rest}" if name else rest


def known_keys(entries: Iterable[str]) -> tuple[KnownKey, ...]:
    """Of hashed entries."""
    parted = (entry.rpartition("=") for entry in entries)
    return tuple(
        KnownKey(hashlib.sha256((name or digest).encode()).hexdigest()[:OWNER_DIGITS], digest) for name, _, digest in parted
    )


def entries_in(text: str) -> list[str]:
    """Of a file of keys: one a line, `#` begins a comment."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
