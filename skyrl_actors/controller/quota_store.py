"""Set quotas of API keys while the service runs, and read what keys used."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict

from skyrl_actors.controller.key_store import KeyStore
from skyrl_actors.controller.quotas import Quotas
from skyrl_actors.journal.entries import Audited, QuotaSet
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.keys import AuditEntry
from skyrl_actors.messages.usage import ALL_KEYS, DAY_S, LIMITS, OwnerQuota, Quota, Usage

HEAVIEST = 1000.0
DIVIDED = (
    "limits of keys need all sessions of a key on one controller, and this service spreads them; "
    "set shards.spread=key and start it again"
)


class QuotaStore:
    """The quotas in the journal. `quotas` decides by them."""

    def __init__(
        self,
        journal: Journal,
        keys: KeyStore,
        quotas: Quotas,
        wall: Callable[[], float],
        are_divided: bool = False,
    ):
        """`are_divided`: several controllers have sessions of one key."""
        self._are_divided = are_divided
        self._journal = journal
        self._keys = keys
        self._quotas = quotas
        self._wall = wall
        self._acting = asyncio.Lock()

    async def begin(self, stored: Iterable[OwnerQuota]) -> None:
        """Take the quotas and today's usage that are in the journal."""
        today = self._wall() // DAY_S * DAY_S
        self._quotas.begin(stored, await self._journal.usage(today, today + DAY_S))

    async def list_quotas(self) -> list[OwnerQuota]:
        """Return the quotas that were set."""
        return self._quotas.all()

    async def set_quota(self, which: str, quota: Quota, actor: str) -> OwnerQuota:
        """Set the quota of a key's name or id, or with `ALL_KEYS` of keys without their own.

        Raises NotFound for an unknown name, InvalidRequest for a limit out of range.
        """
        check(quota)
        if self._are_divided and any(getattr(quota, name) is not None for name in LIMITS):
            raise InvalidRequest(DIVIDED)
        async with self._acting:
            owner, name = (ALL_KEYS, "") if which == ALL_KEYS else self._keys.owner_named(which)
            new = OwnerQuota(owner=owner, name=name, quota=quota)
            if new in self._quotas.all():
                return new
            entry = AuditEntry(
                at=self._wall(), actor=actor[:200], act="limit", subject=described(new)
            )
            await self._journal.write(QuotaSet(new), Audited(entry))
            self._quotas.set(new)
            return new

    async def take_quotas(self, quotas: list[OwnerQuota]) -> None:
        """Set quotas as the first shard of this service has them. A repeat changes nothing."""
        async with self._acting:
            changed = [quota for quota in quotas if quota not in self._quotas.all()]
            if changed:
                await self._journal.write(*map(QuotaSet, changed))
                for quota in changed:
                    self._quotas.set(quota)

    async def usage(self, since: float, until: float, owner: str | None) -> list[Usage]:
        """Return the usage of hours that begin from `since` to before `until`.

        `owner` None: that of all.
        """
        return await self._journal.usage(since, until, owner)

    async def owner_named(self, which: str) -> str:
        """Return the owner of a valid key by its name or id. Raises NotFound."""
        return self._keys.owner_named(which)[0]

    async def owner_names(self) -> dict[str, str]:
        """Return the names of all owners that have or had a key with a name."""
        return self._keys.names()


def check(quota: Quota) -> None:
    """Raise InvalidRequest for a limit or a weight out of range."""
    for name in LIMITS:
        value = getattr(quota, name)
        least = 1 if name.endswith("_minute") else 0  # no rate fills a bucket of 0
        if value is not None and not least <= value < 2**62:
            raise InvalidRequest(f"{name} is {value}; use {least} to 2^62, or none for no limit")
    if not 0 < quota.weight <= HEAVIEST:
        raise InvalidRequest(f"the weight is {quota.weight}; use more than 0, up to {HEAVIEST:g}")


def described(quota: OwnerQuota) -> str:
    """Return a quota as a line of text."""
    values = {name: value for name, value in asdict(quota.quota).items() if value is not None}
    given = ", ".join(f"{name} {value:g}" for name, value in values.items())
    return f"{quota.name or quota.owner}: {given}"
