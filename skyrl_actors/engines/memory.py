"""Device memory of the engines of this service: sleep, wake, and release of the KV cache."""

import asyncio
from collections.abc import Callable
from typing import Literal

from skyrl_actors.colocation.parts import PartMoves
from skyrl_actors.engines.interface import BASE_VERSION, EngineProcess
from skyrl_actors.engines.local_engine import DROPPED
from skyrl_actors.engines.replica import EngineReplica


class EngineMemory:
    """Move the memory of all engines that `living` returns.

    Each call is one move. It returns bytes, or None if there was no engine.
    """

    def __init__(
        self, living: Callable[[], list[EngineReplica]], sleep_level: Literal["auto", "1", "2"]
    ):
        self.moves = PartMoves()
        self.have_weights = asyncio.Event()  # set while engines have memory for weights
        self.have_weights.set()
        self._living = living
        self._sleep_level = sleep_level

    async def sleep(self) -> int | None:
        """Put all engines to sleep.

        With "auto", engines that hold the base keep it in host memory (level 1). Other engines drop
        their weights (level 2), because the next full fine-tune sends them again.
        """
        self.have_weights.clear()
        return await self.moves.carry_out(self._living(), self._sleep_one)

    async def _sleep_one(self, engine: EngineReplica) -> int:
        auto = 1 if engine.lock.state == BASE_VERSION else 2
        level = auto if self._sleep_level == "auto" else int(self._sleep_level)
        if engine.lock.busy:  # frozen samples still need the weights
            level = 1
        async with engine.moving:
            freed = await engine.ask(EngineProcess.sleep, level)
            if level == 2:
                engine.lock.forget(DROPPED)
        return freed

    async def release_kv(self, weights_stay: bool) -> int | None:
        """Free the KV cache. `weights_stay`: false if the next move frees the weights too."""

        async def one(engine: EngineReplica) -> int:
            async with engine.moving:
                return await engine.ask(EngineProcess.release_kv, weights_stay)

        self.have_weights.clear()
        try:
            return await self.moves.carry_out(self._living(), one)
        finally:
            if weights_stay:  # also after a failure of one engine: the others continue
                self.have_weights.set()

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> int | None:
        try:
            return await self.moves.carry_out(
                self._living(), lambda engine: engine.ask(EngineProcess.wake, tag)
            )
        finally:
            self.have_weights.set()
