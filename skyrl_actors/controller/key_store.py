"""API keys that commands add and revoke while the service runs.

The controller owns them. They are in the journal, so that they survive its restart. Ingress
replicas fetch the table when theirs is older than a second.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace

from skyrl_actors.config.keys import HASH, NAME, entry_parts, owner_of_name
from skyrl_actors.journal.entries import Audited, KeyStored
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.keys import ROLES, Act, AuditEntry, KeyTable, StoredKey

MOST_KEYS = 10_000  # that are valid at a time


def table_of(keys: Iterable[StoredKey]) -> KeyTable:
    """Return the table of these keys. Its version is a hash of them."""
    ordered = tuple(sorted(keys, key=lambda key: (key.created_at, key.digest)))
    content = repr([astuple(key) for key in ordered]).encode()
    return KeyTable(version=hashlib.sha256(content).hexdigest()[:16], keys=ordered)


def configured_keys(entries: Iterable[str]) -> list[StoredKey]:
    """Return the keys of `http.api_keys`, which may be revoked here as well."""
    parts = (entry_parts(entry) for entry in entries)
    return [
        StoredKey(digest=digest, name=name, role="tenant", created_at=0.0) for name, digest in parts
    ]


class KeyStore:
    """The stored keys, and the acts on them. `configured`: the keys of the config."""

    def __init__(self, journal: Journal, configured: Iterable[str], wall: Callable[[], float]):
        self._journal = journal
        self._configured = {key.digest: key for key in configured_keys(configured)}
        self._wall = wall
        self._keys: dict[str, StoredKey] = {}
        self._names: dict[str, str] = {}
        self._table = table_of(())
        self.begin(())
        self._acting = asyncio.Lock()  # an act decides by what the one before it stored

    def begin(self, keys: Iterable[StoredKey]) -> None:
        """Take the keys that are in the journal."""
        self._keys = {key.digest: key for key in keys}
        known = (self._configured | self._keys).values()
        self._names = {owner_of_name(key.name, ""): key.name for key in known if key.name}
        self._table = table_of(self._keys.values())

    async def known_keys(self, version: str) -> KeyTable | None:
        """Return all stored keys, or None if the caller has this version of them."""
        return None if version == self._table.version else self._table

    async def list_keys(self) -> list[StoredKey]:
        """Return the keys of the config and the stored ones, oldest first."""
        return list(table_of((self._configured | self._keys).values()).keys)

    async def add_key(self, key: StoredKey, actor: str) -> StoredKey:
        """Store a key. A repeat changes nothing. Raises InvalidRequest for a wrong one."""
        async with self._acting:
            if key.digest in self._keys:
                return self._keys[key.digest]
            self._check(key)
            await self._store([key], "add", actor, f"{_shown(key)}, {key.role}{_until(key)}")
            return key

    async def rotate_key(self, key: StoredKey, grace_s: float, actor: str) -> list[StoredKey]:
        """Store a key, and end the other valid keys of its name and role after `grace_s`.

        Returns the other ones as they are now. Raises NotFound if there is none.
        """
        async with self._acting:
            now, same = self._wall(), (key.name, key.role)
            others = [old for old in self._valid(now) if (old.name, old.role) == same]
            if not others:
                raise NotFound(
                    f"no valid key has the name {key.name!r} and the role {key.role}; use `key add`"
                )
            if key.digest in self._keys:
                return [old for old in others if old.digest != key.digest]
            self._check(key)
            ends = now + max(0.0, grace_s)
            ended = [replace(old, expires_at=min(ends, old.expires_at or ends)) for old in others]
            text = f"{_shown(key)} in place of {', '.join(old.key_id for old in ended)}"
            await self._store([key, *ended], "rotate", actor, text)
            return ended

    async def revoke_key(self, which: str, actor: str, at: float) -> list[StoredKey]:
        """Revoke a key by its id, or all keys of a name. Returns them.

        `at` is the time of the command; a repeat of it returns the same keys. Raises NotFound if no
        valid key has that id or name.
        """
        async with self._acting:
            named = [key for key in self._keys.values() if which in (key.key_id, key.name)]
            if repeated := [key for key in named if key.revoked_at == at]:
                return repeated
            valid = self._valid(self._wall())
            found = [key for key in valid if which and which in (key.key_id, key.name)]
            if not found:
                raise NotFound(
                    f"no valid key has the id or name {which[:80]!r}; `key list` shows all"
                )
            revoked = [replace(key, revoked_at=at) for key in found]
            await self._store(revoked, "revoke", actor, ", ".join(map(_shown, revoked)))
            return revoked

    async def take_keys(self, keys: list[StoredKey]) -> None:
        """Store keys as the first shard of this service has them. A repeat changes nothing."""
        async with self._acting:
            changed = [key for key in keys if self._keys.get(key.digest) != key]
            if changed:
                await self._journal.write(*map(KeyStored, changed))
                self.begin((self._keys | {key.digest: key for key in changed}).values())

    def owner_named(self, which: str) -> tuple[str, str]:
        """Return owner and name of a valid key by its name or id. Raises NotFound."""
        for key in self._valid(self._wall()):
            if which and which in (key.key_id, key.name):
                return owner_of_name(key.name, key.digest), key.name
        raise NotFound(f"no valid key has the id or name {which[:80]!r}; `key list` shows all")

    def names(self) -> dict[str, str]:
        """Return the names of owners that have one."""
        return dict(self._names)

    def label(self, owner: str) -> str:
        """Return the name of an owner. One without a name is its own label."""
        return self._names.get(owner, owner)

    def _valid(self, now: float) -> list[StoredKey]:
        return [key for key in (self._configured | self._keys).values() if key.is_valid(now)]

    def _check(self, key: StoredKey) -> None:
        if not NAME.fullmatch(key.name) or not HASH.fullmatch(key.digest):
            raise InvalidRequest(
                f"the name of a key is {key.name[:64]!r}; use 1 to 64 of the characters "
                "A-Z a-z 0-9 _ . -, and a letter or digit first"
            )
        if key.role not in ROLES:
            raise InvalidRequest(f"the role is {key.role!r}; use {', '.join(ROLES)}")
        if key.digest in self._configured:
            raise InvalidRequest("the key is in http.api_keys")
        if not key.is_valid(self._wall()):
            raise InvalidRequest("the key would have expired already")
        if len(self._valid(self._wall())) >= MOST_KEYS:
            raise InvalidRequest(f"{MOST_KEYS} keys are valid, which is the limit; revoke some")

    async def _store(self, keys: list[StoredKey], act: Act, actor: str, subject: str) -> None:
        entry = AuditEntry(at=self._wall(), actor=actor[:200], act=act, subject=subject)
        await self._journal.write(*map(KeyStored, keys), Audited(entry))
        self.begin((self._keys | {key.digest: key for key in keys}).values())


def _shown(key: StoredKey) -> str:
    return f"{key.name or '-'} {key.key_id}"


def _until(key: StoredKey) -> str:
    return "" if key.expires_at is None else f", expires at {key.expires_at:.0f}"
