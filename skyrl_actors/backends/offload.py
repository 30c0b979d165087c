"""Carry out the moves of the phase lock: load and free memory of groups and engines."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.colocation.parts import PartMoves, Resident
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock, PhaseLock, SplitPhaseLock
from skyrl_actors.colocation.phases import RESIDENT, MemoryPart, Move, Phase
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError

TRAIN_PARTS = {
    MemoryPart.TRAIN_WEIGHTS: "weights",
    MemoryPart.GRADIENTS: "gradients",
    MemoryPart.OPTIMIZER: "optimizer",
}


class Offloader:
    """Move device memory. `sharing`: the groups that share their devices with engines."""

    def __init__(self, device: str, sharing: Sequence[GroupSupervisor], engines: EnginePool):
        self._on_cpu = device == "cpu"
        self._sharing = sharing
        self._engines = engines
        self._groups = PartMoves()

    async def move(self, move: Move, to: Phase) -> int | None:
        """Carry out one move; return bytes. Restarting parts start in the new phase's state."""
        memory = self._engines.memory
        if move.part in TRAIN_PARTS:
            return await self._move_groups(
                TRAIN_PARTS[move.part], "device" if move.action == "load" else "host"
            )
        if move.action == "load":
            return await memory.wake(
                "weights" if move.part is MemoryPart.ENGINE_WEIGHTS else "kv_cache"
            )
        if move.part is MemoryPart.ENGINE_WEIGHTS:
            return await memory.sleep()
        return await memory.release_kv(MemoryPart.ENGINE_WEIGHTS in RESIDENT[to])

    def restart_now(self, move: Move, everything: bool, reason: str) -> None:
        """Restart the parts that did not finish `move`; if unknown, all that share the devices."""
        moves = self._groups if move.part in TRAIN_PARTS else self._engines.memory.moves
        parts: Sequence[Resident] = moves.unfinished
        if everything or not parts:
            parts = [*self._sharing, *self._engines.living_own()]
        for part in parts:
            part.restart_now(reason)

    async def as_taken_over(self, phase: Phase) -> None:
        """Bring parts that were taken over into the state of TRAIN or IDLE.

        Engines sleep. Trainers get the memory that the phase gives them. Parts that fail restart.
        """
        memory = self._engines.memory
        await self._remake_failed(memory.moves, memory.sleep())
        for part, name in TRAIN_PARTS.items():
            direction = "device" if part in RESIDENT[phase] else "host"
            await self._remake_failed(self._groups, self._move_groups(name, direction))

    async def _remake_failed(self, moves: PartMoves, work: Awaitable[int | None]) -> None:
        try:
            await work
        except InternalError as error:
            for part in moves.unfinished:
                part.restart_now(str(error))

    async def _move_groups(self, part: Any, direction: Any) -> int | None:
        if self._on_cpu:
            return 0  # host and device are the same memory

        async def one(supervisor: GroupSupervisor) -> int:
            assert supervisor.group is not None
            return await supervisor.guarded(supervisor.group.move((part,), direction))

        up = [each for each in self._sharing if each.group is not None and each.down is None]
        return await self._groups.carry_out(up, one)


def offloader_for(
    config: ClusterConfig, groups: Mapping[str, GroupSupervisor], engines: EnginePool
) -> Offloader:
    """Return an offloader of the engines and of the groups that share devices with others."""
    sharing = [group for role, group in groups.items() if config.placement.shares(role)]
    return Offloader(config.placement.device, sharing, engines)


def phase_lock_for(
    config: ClusterConfig, offloader: Offloader, start: Phase = Phase.TRAIN, parks: bool = False
) -> PhaseLock:
    """Build the phase lock of the layout, which begins in `start`.

    `parks`: all memory has to leave the devices at times.
    """
    if not parks and (config.placement.layout == "split" or not config.engine.num_engines):
        return SplitPhaseLock()
    healing = MoveHealing(advise_after=max(config.restart.max_in_a_row, 1))
    return ColocatedPhaseLock(offloader, start, 2 * config.restart.call_timeout_s, healing)
