"""Which shards answer, asked while requests come.

A controller whose process is gone is noticed at once by those that call it. One that stands still
is not, so each shard is asked every two seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from skyrl_actors.messages.errors import SkyrlActorsError, Unavailable
from skyrl_actors.remote import ended

R = TypeVar("R")
ASK_S = 2.0
ANSWER_S = 2.0
LOOK_S = 0.25
FAULTY_S = 3.0  # how long a shard with a fault may take: one that starts answers only then
IDLE_S = 30.0  # without requests, nothing is asked


class Asked(Protocol):
    """A shard that tells why it does not serve requests now, or None."""

    async def fault_within(self, timeout_s: float) -> str | None: ...


class SilentShards:
    """What is known of each shard, by its number from 1. A shard that was not asked is trusted."""

    def __init__(self, shards: Sequence[Asked]):
        self._shards = shards
        self._silent: set[int] = set()
        self._faults: dict[int, str | None] = {}
        self._asking: asyncio.Task[None] | None = None
        self._used_at = 0.0

    def ordered(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers: first those that serve, then those that answer, then the others."""
        return sorted(numbers, key=lambda n: (n in self._silent, self._faults.get(n) is not None))

    def is_silent(self, number: int) -> bool:
        return number in self._silent

    def serves(self, number: int) -> bool:
        """Return whether a shard answered last, without a fault."""
        return number not in self._silent and self._faults.get(number) is None

    def used(self) -> None:
        """Ask the shards from now on, until there are no requests for `IDLE_S`."""
        loop = asyncio.get_running_loop()
        self._used_at = loop.time()
        if self._asking is None or self._asking.done() or self._asking.get_loop() is not loop:
            self._asking = loop.create_task(self._ask_while_used(loop.time))

    async def unless_away(self, number: int, call: Awaitable[R]) -> R:
        """Return the answer of a call.

        Raises Unavailable once the shard is silent, or if it has a fault and takes `FAULTY_S`.
        """
        now = asyncio.get_running_loop().time
        calling: asyncio.Future[Any] = asyncio.ensure_future(call)
        began = now()
        try:
            while not calling.done():
                late = now() - began > FAULTY_S
                if self.is_silent(number) or (late and not self.serves(number)):
                    raise Unavailable(self._faults.get(number) or "it does not answer")
                await asyncio.wait([calling], timeout=LOOK_S)
            return await calling
        finally:
            calling.cancel()

    async def close(self) -> None:
        await ended(self._asking)

    async def _ask_while_used(self, now: Callable[[], float]) -> None:
        while now() - self._used_at < IDLE_S:
            await asyncio.gather(*(self._ask(n) for n in range(1, len(self._shards) + 1)))
            await asyncio.sleep(ASK_S)

    async def _ask(self, number: int) -> None:
        try:
            self._faults[number] = await self._shards[number - 1].fault_within(ANSWER_S)
        except SkyrlActorsError:
            self._silent.add(number)
        else:
            self._silent.discard(number)
