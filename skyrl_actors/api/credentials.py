"""The API keys that this process accepts: those of the config, and those in the journal.

The journal's keys are fetched from the controller when a request comes and the table is older than
a second. So a new key works, and a revoked one is refused, within a second, and an idle service
asks for nothing. While the controller is away, the last table holds.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from skyrl_actors.config.keys import digest_of, known_keys, owner_of_name
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.keys import KeyTable, Role, StoredKey, id_of

log = logging.getLogger(__name__)
FRESH_S = 1.0
UNKNOWN_FRESH_S = 0.1  # before an unknown key is refused
AWAY_S = 5.0  # after a fetch failed, the next ones hold up no request for so long
TIMEOUT_S = 2.0  # for a newer table, while there is an older one


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key gives: the objects of an owner, and a role. `key_id` names the key."""

    owner: str
    role: Role = "tenant"
    key_id: str = ""


class Credentials:
    """Grants of API keys. `fetch` returns a table of another version than the given one."""

    def __init__(
        self,
        configured: Iterable[str],
        fetch: Callable[[str], Awaitable[KeyTable | None]],
        wall: Callable[[], float] = time.time,
    ):
        self._configured = {
            key.digest: Grant(key.owner, key_id=id_of(key.digest)) for key in known_keys(configured)
        }
        self._fetch = fetch
        self._wall = wall
        self._table: KeyTable | None = None
        self._stored: dict[str, StoredKey] = {}
        self._of_owner: dict[str, set[str]] = {}  # the hashes of an owner's keys
        self._asked_at = 0.0
        self._asking = asyncio.Lock()
        self._is_away = False  # the last fetch failed, and there is a table
        self._failed_at = 0.0
        self._refreshing: asyncio.Task[None] | None = None

    async def refresh(self, at_most_s: float = FRESH_S) -> None:
        """Fetch the table if it is older. Raises Unavailable if there never was one."""
        if not self._is_old(at_most_s):
            return
        if self._is_away and time.monotonic() - self._failed_at < AWAY_S:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.create_task(self._refreshed(at_most_s))
            return
        await self._refreshed(at_most_s)

    async def _refreshed(self, at_most_s: float) -> None:
        async with self._asking:
            if not self._is_old(at_most_s):
                return
            version = "" if self._table is None else self._table.version
            timeout_s = None if self._table is None else TIMEOUT_S
            try:
                async with asyncio.timeout(timeout_s):
                    found = await self._fetch(version)
            except (Unavailable, TimeoutError) as error:
                if self._table is None:
                    raise
                log.warning("API keys are those of the last fetch: %s", error or "no answer")
                self._is_away, self._failed_at = True, time.monotonic()
            else:
                self._is_away = False
                if found is not None:
                    self._take(found)
            self._asked_at = time.monotonic()

    def _take(self, table: KeyTable) -> None:
        self._table = table
        self._stored = {key.digest: key for key in table.keys}
        self._of_owner = defaultdict(set)
        for digest, grant in self._configured.items():
            self._of_owner[grant.owner].add(digest)
        for key in table.keys:
            self._of_owner[owner_of_name(key.name, key.digest)].add(key.digest)

    def _is_old(self, at_most_s: float) -> bool:
        return self._table is None or time.monotonic() - self._asked_at >= at_most_s

    @property
    def required(self) -> bool:
        """Whether requests need a key. A service does not open when its last key is revoked."""
        return bool(self._configured or (self._table and self._table.keys))

    @property
    def hide_faults(self) -> bool:
        """Whether clients get no details of faults: with keys, or while that is not known."""
        return self.required or self._table is None

    def _grant_of(self, digest: str) -> Grant | None:
        stored = self._stored.get(digest)
        if stored is None:
            return self._configured.get(digest)
        return _grant(stored) if stored.is_valid(self._wall()) else None

    async def grant(self, key: str) -> Grant | None:
        """Return the grant of a key; None if it is unknown, expired or revoked."""
        await self.refresh()
        digest = digest_of(key)
        if self._grant_of(digest) is None:
            await self.refresh(UNKNOWN_FRESH_S)
        return self._grant_of(digest)

    async def is_granted(self, grant: Grant) -> bool:
        """Return whether the key that a token was made for is still valid and gives the same."""
        await self.refresh()
        return any(self._grant_of(d) == grant for d in self._of_owner.get(grant.owner, ()))


def _grant(key: StoredKey) -> Grant:
    return Grant(owner_of_name(key.name, key.digest), key.role, key.key_id)
