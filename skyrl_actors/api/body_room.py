"""How many bytes of request bodies are in the memory of one ingress process at once.

Large bodies wait until there is room for them, and no API key may have more than half of it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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

    @asynccontextmanager
    async def hold(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Raises CapacityError when there was no room for PATIENCE_S."""
        if num_bytes <= SMALL_BYTES:
            yield
            return
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
        try:
            yield
        finally:
            self.taken -= num_bytes
            self._of_owner[owner] -= num_bytes
            if not self._of_owner[owner]:
                del self._of_owner[owner]
            async with self._given:
                self._given.notify_all()

    def _has_room(self, owner: str, num_bytes: int) -> bool:
        held = self._of_owner[owner]
        share = self.limit // 2 if owner else self.limit
        return not self.taken or (self.taken + num_bytes <= self.limit and (not held or held + num_bytes <= share))
