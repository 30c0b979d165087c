"""The keys, limits and mode that all shards have from the first one, where commands change them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_actors.api.client import ControllerClient, Limits
from skyrl_actors.api.silent_shards import SilentShards
from skyrl_actors.messages.errors import SkyrlActorsError
from skyrl_actors.messages.keys import KeyTable
from skyrl_actors.messages.operating import Mode
from skyrl_actors.messages.usage import LIMITS, OwnerQuota
from skyrl_actors.remote import ended

log = logging.getLogger(__name__)
EVERY_S = 2.0
FIRST_SHARD = "the first shard"  # the actor in the audit log of a shard that gets its mode
PATIENCE = Limits(0.0, 5.0)


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """The stored keys, the limits that were set, and the mode."""

    table: KeyTable
    quotas: tuple[OwnerQuota, ...]
    mode: Mode

    @classmethod
    async def read(
        cls, first: ControllerClient, known: "SharedSettings | None" = None
    ) -> "SharedSettings":
        """Return the settings of the first shard. `known`: those of an earlier call."""
        calls = first.within(PATIENCE)
        table = await calls.known_keys("" if known is None else known.table.version)
        if table is None:
            assert known is not None
            table = known.table
        return cls(table, tuple(await calls.list_quotas()), await calls.get_mode())

    async def give(self, other: ControllerClient) -> None:
        """Let another shard have them. A repeat changes nothing."""
        calls = other.within(PATIENCE)
        await calls.take_keys(list(self.table.keys))
        await calls.take_quotas(list(self.quotas))
        await calls.set_mode(self.mode, FIRST_SHARD)

    @property
    def has_limits(self) -> bool:
        return any(getattr(one.quota, name) is not None for one in self.quotas for name in LIMITS)


class Sharing:
    """Gives the settings of the first shard to the others, again after each change."""

    def __init__(self, shards: Sequence[ControllerClient], health: SilentShards):
        self._shards = shards
        self._health = health
        self._known: SharedSettings | None = None
        self._given: dict[int, SharedSettings] = {}
        self._running: asyncio.Task[None] | None = None

    def used(self) -> None:
        """Begin, with the first request. Only ingress processes do it, which go on."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        await ended(self._running)

    async def _run(self) -> None:
        while True:
            try:
                await self._share()
            except SkyrlActorsError as error:
                log.info("keys and limits are not shared now: %s", error)
            await asyncio.sleep(EVERY_S)

    async def _share(self) -> None:
        self._known = shared = await SharedSettings.read(self._shards[0], self._known)
        for number, shard in enumerate(self._shards[1:], 2):
            if not self._health.serves(number):
                self._given.pop(number, None)  # it may come back with an older journal
            elif self._given.get(number) != shared:
                await shared.give(shard)
                self._given[number] = shared
