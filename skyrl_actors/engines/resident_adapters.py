"""Which adapters an engine holds in memory, and which of them samples use (no torch, no vLLM).

Adapters that no sample uses make room for others, the least recently used first.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from skyrl_actors.engines.versions import once

H = TypeVar("H")
T = TypeVar("T")


class ResidentAdapters(Generic[H]):
    """At most `most` adapters by version; H is what the engine keeps for each."""

    def __init__(self, most: int):
        self.room = asyncio.Event()  # set when a sample ends, for those that wait for room
        self._most = most
        self._held: OrderedDict[str, H] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._reads: dict[Any, asyncio.Task[Any]] = {}

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self._held)

    async def read(self, version: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Read or check an adapter's files once for all that wait, unless it is held."""
        return None if version in self._held else await once(self._reads, version, work)

    def use(self, version: str) -> H | None:
        """Count a sample as a user until `release`. Returns None if the adapter is not held."""
        if version not in self._held:
            return None
        self._held.move_to_end(version)
        self._users[version] += 1
        return self._held[version]

    def release(self, version: str) -> None:
        self._users[version] -= 1
        if self._users[version] <= 0:
            del self._users[version]
        self.room.set()

    def add(self, version: str, held: H) -> None:
        self._reads.pop(version, None)  # the next read looks at the files again
        self._held[version] = held

    def to_drop(self) -> str | None:
        """Return what must be dropped before another is added; None if nothing need be.

        Raises LookupError if samples use all of them. Then wait for `room`.
        """
        if len(self._held) < self._most:
            return None
        for version in self._held:
            if version not in self._users:
                return version
        self.room.clear()
        raise LookupError

    def pop(self, version: str) -> H | None:
        self._reads.pop(version, None)
        return self._held.pop(version, None)

    def clear(self) -> None:
        self._reads.clear()
        self._held.clear()
