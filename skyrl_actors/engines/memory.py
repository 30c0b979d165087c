"""What the engines of this service hold on their devices: they sleep, wake, and let go of their KV cache."""

import asyncio
from collections.abc import Callable
from typing import Literal

from skyrl_actors.colocation.parts import PartMoves
from skyrl_actors.engines.engine import DROPPED
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.member import Member


class EngineMemory:
    """Each call is one move of all engines that `living` names; bytes, or None when there was none."""

    def __init__(self, living: Callable[[], list[Member]], sleep_level: Literal["auto", "1", "2"]):
        self.moves = PartMoves()
        self.have_weights = asyncio.Event()  # engines have memory for weights
        self.have_weights.set()
        self._living = living
        self._sleep_level = sleep_level

    async def sleep(self) -> int | None:
        """Level 2 (weights dropped) where the next full fine-tune sends them again, level 1 where the base stays."""
        self.have_weights.clear()
        return await self.moves.carry_out(self._living(), self._asleep)

    async def _asleep(self, engine: Member) -> int:
        auto = 1 if engine.gate.state == BASE_VERSION else 2
        level = auto if self._sleep_level == "auto" else int(self._sleep_level)
        if engine.gate.busy:  # frozen samples need their weights again
            level = 1
        async with engine.moving:
            freed = await engine.ask("sleep", level)
            if level == 2:
                engine.gate.forget(DROPPED)
        return freed

    async def release_kv(self, weights_stay: bool) -> int | None:
        """Free the KV cache; the weights stay, or leave next."""

        async def one(engine: Member) -> int:
            async with engine.moving:
                return await engine.ask("release_kv", weights_stay)

        self.have_weights.clear()
        try:
            return await self.moves.carry_out(self._living(), one)
        finally:
            if weights_stay:  # also where one failed: the others go on
                self.have_weights.set()

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> int | None:
        try:
            return await self.moves.carry_out(self._living(), lambda engine: engine.ask("wake", tag))
        finally:
            self.have_weights.set()
