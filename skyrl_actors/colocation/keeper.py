"""The one owner of what is resident on the devices.

`hold(phase)` is the only thing that moves memory. Colocated, phases take turns; on separate devices trainers and engines
keep their memory, and `hold` is free. Callers read the same either way.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from skyrl_actors.colocation.gate import Gate
from skyrl_actors.colocation.phases import Move, Phase, plan_moves, serves
from skyrl_actors.messages.errors import InternalError


class Movable(Protocol):
    async def move(self, move: Move, to: Phase) -> None:
        """Carry out one move on the way to phase `to`."""
        ...


class Keeper(Protocol):
    def hold(self, phase: Phase) -> AbstractAsyncContextManager[None]: ...

    @property
    def phase(self) -> str: ...

    @property
    def move_seconds(self) -> dict[str, float]:
        """Seconds spent so far, by move."""
        ...


class PhaseKeeper:
    """Colocated layout. A move that fails or exceeds `timeout_s` leaves the keeper BROKEN, naming the move."""

    def __init__(self, movable: Movable, start: Phase, timeout_s: float):
        self._movable = movable
        self._timeout_s = timeout_s
        self._gate: Gate[Phase] = Gate(start, self._enter, serves)
        self.move_seconds: dict[str, float] = {}

    @property
    def phase(self) -> str:
        return "BROKEN" if self._gate.broken else str(self._gate.state)

    def hold(self, phase: Phase) -> AbstractAsyncContextManager[None]:
        return self._gate.hold(phase)

    async def _enter(self, current: Phase, wanted: Phase) -> None:
        for move in plan_moves(current, wanted):
            started = time.perf_counter()
            try:
                await asyncio.wait_for(self._movable.move(move, wanted), self._timeout_s)
            except TimeoutError:
                raise InternalError(f"'{move}' took longer than {self._timeout_s:.0f} s") from None
            except InternalError as error:
                raise InternalError(f"'{move}' failed: {error}") from error
            self.move_seconds[str(move)] = self.move_seconds.get(str(move), 0.0) + time.perf_counter() - started


class SplitKeeper:
    """Trainers and engines on devices of their own: everything stays resident."""

    def __init__(self) -> None:
        self.move_seconds: dict[str, float] = {}

    phase = "SPLIT"

    @asynccontextmanager
    async def hold(self, phase: Phase) -> AsyncGenerator[None]:
        yield
