"""A lock for each key, which exists as long as a task holds it or waits for it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class KeyedLocks:
    """Locks by key, for tasks of one event loop."""

    def __init__(self) -> None:
        # By key: its lock, and the number of tasks that hold it or wait for it.
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def holding(self, key: str) -> AsyncGenerator[None]:
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            users = self._locks[key][1] - 1
            if users:
                self._locks[key] = lock, users
            else:
                del self._locks[key]
