"""Deadlines of samples, which pause while their engine sleeps."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from skyrl_actors.messages.errors import InternalError, StateLost


class PausableDeadlines:
    """Give each block of `within` the same seconds, not counting those between pause and resume."""

    def __init__(self, seconds: float):
        self.steps = 0  # that the engine has computed; the engine counts them
        self._seconds = seconds
        # The value is the seconds left, valid while the deadlines pause.
        self._left_s: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def within(self) -> AsyncGenerator[None]:
        """Run a block with a deadline. Raises TimeoutError after it."""
        async with asyncio.timeout(self._seconds) as deadline:
            self._left_s[deadline] = self._seconds
            try:
                yield
            finally:
                del self._left_s[deadline]

    @asynccontextmanager
    async def of_sample(self, request_id: str, engine: str) -> AsyncGenerator[None]:
        """Run a sample with a deadline.

        After it, raises InternalError, or StateLost if the engine has computed no step since the
        sample began: such an engine must be restarted.
        """
        begun = self.steps
        try:
            async with self.within():
                yield
        except TimeoutError:
            late = f"request {request_id} did not finish within {self._seconds:.0f} s on {engine}"
            if self.steps == begun:
                raise StateLost(f"{late}, which computed nothing meanwhile") from None
            raise InternalError(late) from None

    def pause(self) -> None:
        now = asyncio.get_running_loop().time()
        for deadline in self._left_s:
            when = deadline.when()
            if when is not None and not deadline.expired():
                self._left_s[deadline] = when - now
                deadline.reschedule(None)

    def resume(self) -> None:
        now = asyncio.get_running_loop().time()
        for deadline, left_s in self._left_s.items():
            if deadline.when() is None and not deadline.expired():
                deadline.reschedule(now + left_s)
