"""The moves of the phase keeper: what of groups and engines goes to the devices, and what leaves them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from skyrl_actors.colocation.phases import RESIDENT, Move, Part, Phase
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import StateLost

TRAIN_PARTS = {Part.TRAIN_WEIGHTS: "weights", Part.GRADIENTS: "gradients", Part.OPTIMIZER: "optimizer"}


class Mover:
    """`sharing`: the groups that share their devices with engines."""

    def __init__(self, device: str, sharing: Sequence[GroupSupervisor], engines: EnginePool):
        self._on_cpu = device == "cpu"
        self._sharing = sharing
        self._engines = engines

    async def move(self, move: Move, to: Phase) -> int:
        """One move of the keeper; bytes. What is being made anew comes up as the phase wants it."""
        if move.part in TRAIN_PARTS:
            return await self._groups(TRAIN_PARTS[move.part], "device" if move.action == "load" else "host")
        if move.action == "load":
            return await self._engines.wake("weights" if move.part is Part.ENGINE_WEIGHTS else "kv_cache")
        if move.part is Part.ENGINE_WEIGHTS:
            return await self._engines.sleep()
        return await self._engines.release_kv(Part.ENGINE_WEIGHTS in RESIDENT[to])

    async def as_in_train(self) -> None:
        """Trainers have what the phase TRAIN gives them; the caller has put the engines to sleep."""
        for part in ("weights", "gradients"):
            await self._groups(part, "device")
        await self._groups("optimizer", "host")

    async def _groups(self, part: Any, direction: Any) -> int:
        if self._on_cpu:
            return 0  # one memory
        return sum(await asyncio.gather(*(self._group(supervisor, part, direction) for supervisor in self._sharing)))

    async def _group(self, supervisor: GroupSupervisor, part: Any, direction: Any) -> int:
        if supervisor.group is not None and supervisor.down is None:
            with suppress(StateLost):  # the supervisor makes it anew
                return await supervisor.guarded(supervisor.group.move((part,), direction))
        return 0
