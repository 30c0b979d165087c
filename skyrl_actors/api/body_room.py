"""How many bytes of request bodies are in the memory of one ingress process at once.

Large bodies wait until there is room for them, and no API key may have more than half of it.
"""

import asyncio
from collections import Counter

from skyrl_actors.api.body_limits import SMALL_BYTES
from skyrl_actors.messages.errors import CapacityError

PATIENCE_S = 30.0  # an SDK gives up one attempt after a minute


class BodyRoom:
    """`limit` bytes for bodies that are read and decoded. Small bodies need none of it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        self._of_owner: Counter[str] = Counter()
        self._given = asyncio.Condition()
        self._waking: set[asyncio.Task[None]] = set()

    async def take(self, owner: str, num_bytes: int) -> "Lease":
        """Waits until there is room. Raises CapacityError when there was none for PATIENCE_S."""
        if num_bytes <= SMALL_BYTES:
            return Lease(self, owner, 0)
        async with self._given:
            try:
                has_room = self._given.wait_for(lambda: self._has_room(owner, num_bytes))
                await asyncio.wait_for(has_room, PATIENCE_S)
            except TimeoutError:
                raise CapacityError(
                    f"{self.taken} bytes of request bodies are being read, and {self.limit} are the most "
                    "(limits.body_memory_bytes); try again later"
                ) from None
            self.taken += num_bytes
            self._of_owner[owner] += num_bytes
        return Lease(self, owner, num_bytes)

    def give(self, owner: str, num_bytes: int) -> None:
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
        return not self.taken or (self.taken + num_bytes <= self.limit and (not held or held + num_bytes <= share))


class Lease:
    """Room for one body. It ends when the body has been decoded to something small, at the latest with its request."""

    def __init__(self, room: BodyRoom, owner: str, num_bytes: int):
        self._room = room
        self._owner = owner
        self._num_bytes = num_bytes

    def release(self) -> None:
        """Fine to call twice."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._room.give(self._owner, num_bytes)
