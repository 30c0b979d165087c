"""Which adapters an engine holds in memory, and which of them samples use (no torch, no vLLM).

Adapters that no sample uses make room for others, the least recently used first. While somebody
waits for room, that one takes no new samples, so its last one ends.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from skyrl_actors.engines.deadlines import PausableDeadlines
from skyrl_actors.messages.errors import InternalError

H = TypeVar("H")
T = TypeVar("T")


class ResidentAdapters(Generic[H]):
    """At most `most` adapters by version; H is what the engine keeps for each."""

    def __init__(self, most: int, deadlines: PausableDeadlines):
        self._deadlines = deadlines
        self.room = asyncio.Event()
        self._most = most
        self._held: OrderedDict[str, H] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._seekers: set[object] = set()
        self._reads: dict[str, asyncio.Task[Any]] = {}
        self._readers: Counter[str] = Counter()

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self._held)

    async def read(self, version: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Read or check an adapter's files once for all that wait, unless it is held."""
        if version in self._held:
            return None
        if version not in self._reads:
            self._reads[version] = asyncio.create_task(work())
        task = self._reads[version]
        self._readers[version] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._readers[version] -= 1
            if not self._readers[version]:  # the next one looks at the files again
                del self._readers[version], self._reads[version]
                task.cancel()

    def use(self, version: str) -> H | None:
        """Count a sample as a user until `release`.

        Returns None if the adapter is not held, or makes room for another.
        """
        if version not in self._held or version == self._leaving():
            return None
        return self.take(version)

    def take(self, version: str) -> H:
        """Count a sample as a user of a held adapter, also if that makes room for another."""
        self._held.move_to_end(version)
        self._users[version] += 1
        return self._held[version]

    def release(self, version: str) -> None:
        self._users[version] -= 1
        if self._users[version] <= 0:
            del self._users[version]
        self.room.set()

    def add(self, version: str, held: H) -> None:
        self._held[version] = held

    def to_drop(self) -> str | None:
        """Return what must be dropped before another is added; None if nothing need be.

        Raises LookupError if samples use all of them.
        """
        if len(self._held) < self._most:
            return None
        for version in self._held:
            if version not in self._users:
                return version
        raise LookupError

    async def changed(self, seeker: object, version: str) -> None:
        """Wait until a sample has ended, or another has stopped waiting.

        `seeker` waits for room until `leave`, if its version is not held. Raises InternalError
        after the deadline of a sample.
        """
        if version not in self._held:
            self._seekers.add(seeker)
        self.room.clear()
        try:
            async with self._deadlines.within():
                await self.room.wait()
        except TimeoutError:
            raise InternalError(
                f"adapter {version} found no room in time: running samples use "
                f"{', '.join(self._users)}"
            ) from None

    def leave(self, seeker: object) -> None:
        with suppress(KeyError):
            self._seekers.remove(seeker)
            self.room.set()

    def _leaving(self) -> str | None:
        return next(iter(self._held)) if self._seekers and len(self._held) >= self._most else None

    def pop(self, version: str) -> H | None:
        return self._held.pop(version, None)

    def clear(self) -> None:
        self._held.clear()
