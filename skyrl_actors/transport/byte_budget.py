"""Limit the bytes of large objects in memory, such as request bodies and unsent answers.

A large object waits until it fits. One owner gets at most half of the limit.
"""

import asyncio
from collections import Counter


class ByteBudget:
    """A budget of `limit` bytes. Objects of at most `small` bytes do not count."""

    def __init__(self, limit: int, small: int):
        self.limit = limit
        self.small = small
        self.taken = 0
        self._of_owner: Counter[str] = Counter()
        self._given = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()

    async def take(self, owner: str, num_bytes: int, patience_s: float | None = None) -> "Lease":
        """Wait until the bytes fit. Raises TimeoutError after `patience_s`."""
        if num_bytes <= self.small:
            return Lease(self, owner, 0)
        async with asyncio.timeout(patience_s), self._given:
            await self._given.wait_for(lambda: self._has_room(owner, num_bytes))
            self.taken += num_bytes
            self._of_owner[owner] += num_bytes
        return Lease(self, owner, num_bytes)

    def give(self, owner: str, num_bytes: int) -> None:
        """Return the bytes of a lease to the budget."""
        self.taken -= num_bytes
        self._of_owner[owner] -= num_bytes
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        waking = asyncio.get_running_loop().create_task(self._wake())
        self._waking.add(waking)
        waking.add_done_callback(self._waking.discard)

    async def _wake(self) -> None:
        async with self._given:
            self._given.notify_all()

    def _has_room(self, owner: str, num_bytes: int) -> bool:
        held = self._of_owner[owner]
        share = self.limit // 2 if owner else self.limit
        return not self.taken or (
            self.taken + num_bytes <= self.limit and (not held or held + num_bytes <= share)
        )


class Lease:
    """Bytes that one object occupies until `release`."""

    def __init__(self, room: ByteBudget, owner: str, num_bytes: int):
        self._room = room
        self._owner = owner
        self._num_bytes = num_bytes

    async def exchange(self, num_bytes: int, patience_s: float) -> None:
        """Return the bytes and wait for others. Raises TimeoutError, and then has none."""
        self.release()
        taken = await self._room.take(self._owner, num_bytes, patience_s)
        self._num_bytes, taken._num_bytes = taken._num_bytes, 0

    def release(self) -> None:
        """Return the bytes. A second call has no effect."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._room.give(self._owner, num_bytes)
