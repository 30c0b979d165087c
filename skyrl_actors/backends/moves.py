"""The moves of the phase keeper: what of groups and engines goes to the devices, and what leaves them."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.colocation.keeper import Keeper, PhaseKeeper, SplitKeeper
from skyrl_actors.colocation.parts import PartMoves, Resident
from skyrl_actors.colocation.phases import RESIDENT, Move, Part, Phase
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError

LEAST_PAUSE_S = 0.1  # before a failed move is tried again
TRAIN_PARTS = {Part.TRAIN_WEIGHTS: "weights", Part.GRADIENTS: "gradients", Part.OPTIMIZER: "optimizer"}


class Mover:
    """`sharing`: the groups that share their devices with engines."""

    def __init__(self, device: str, sharing: Sequence[GroupSupervisor], engines: EnginePool):
        self._on_cpu = device == "cpu"
        self._sharing = sharing
        self._engines = engines
        self._groups = PartMoves()

    async def move(self, move: Move, to: Phase) -> int | None:
        """One move of the keeper; bytes. What is being made anew comes up as the phase wants it."""
        memory = self._engines.memory
        if move.part in TRAIN_PARTS:
            return await self._move_groups(TRAIN_PARTS[move.part], "device" if move.action == "load" else "host")
        if move.action == "load":
            return await memory.wake("weights" if move.part is Part.ENGINE_WEIGHTS else "kv_cache")
        if move.part is Part.ENGINE_WEIGHTS:
            return await memory.sleep()
        return await memory.release_kv(Part.ENGINE_WEIGHTS in RESIDENT[to])

    def remake(self, move: Move, everything: bool, reason: str) -> None:
        """What did not finish `move`; all that shares the devices when nobody knows what that is."""
        moves = self._groups if move.part in TRAIN_PARTS else self._engines.memory.moves
        parts: Sequence[Resident] = moves.unfinished
        if everything or not parts:
            parts = [*self._sharing, *self._engines.living_own()]
        for part in parts:
            part.remake(reason)

    async def as_taken_over(self) -> None:
        """Engines sleep, and trainers have what the phase TRAIN gives them, however an earlier controller left them. What
        can not is made anew."""
        memory = self._engines.memory
        await self._or_remade(memory.moves, memory.sleep())
        await self._or_remade(self._groups, self._move_groups("weights", "device"))
        await self._or_remade(self._groups, self._move_groups("gradients", "device"))
        await self._or_remade(self._groups, self._move_groups("optimizer", "host"))

    async def _or_remade(self, moves: PartMoves, work: Awaitable[int | None]) -> None:
        try:
            await work
        except InternalError as error:
            for part in moves.unfinished:
                part.remake(str(error))

    async def _move_groups(self, part: Any, direction: Any) -> int | None:
        if self._on_cpu:
            return 0  # one memory

        async def one(supervisor: GroupSupervisor) -> int:
            assert supervisor.group is not None
            return await supervisor.guarded(supervisor.group.move((part,), direction))

        up = [each for each in self._sharing if each.group is not None and each.down is None]
        return await self._groups.carry_out(up, one)


def mover_for(config: ClusterConfig, groups: Mapping[str, GroupSupervisor], engines: EnginePool) -> Mover:
    sharing = [group for role, group in groups.items() if config.placement.shares(role)]
    return Mover(config.placement.device, sharing, engines)


def keeper_for(config: ClusterConfig, mover: Mover) -> Keeper:
    """It begins in TRAIN."""
    if config.placement.layout == "split" or not config.engine.num_engines:
        return SplitKeeper()
    restart = config.restart
    healing = MoveHealing(max(restart.backoff_s, LEAST_PAUSE_S), restart.max_backoff_s, max(restart.max_in_a_row, 1))
    return PhaseKeeper(mover, Phase.TRAIN, 2 * config.engine.call_timeout_s, healing)
