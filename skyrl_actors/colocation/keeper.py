"""The one owner of what is resident on the devices.

`hold(phase)` is the only thing that moves memory. Colocated, phases take turns; on separate devices trainers and engines
keep their memory, and `hold` is free. Callers read the same either way.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from skyrl_actors.colocation.gate import Gate
from skyrl_actors.colocation.phases import Move, Phase, plan_moves, serves
from skyrl_actors.messages.errors import InternalError

TIMELINE = 1000  # changes of phase that are remembered


class Movable(Protocol):
    async def move(self, move: Move, to: Phase) -> int:
        """Carry out one move on the way to phase `to`; returns the bytes that it moved or freed."""
        ...


@dataclass(frozen=True, slots=True)
class Entered:
    """One change of phase."""

    at: float  # Unix time at which it began
    phase: str
    seconds: float
    moves: tuple[tuple[str, float, int], ...]  # (move, seconds, bytes)


class Keeper(Protocol):
    def hold(self, phase: Phase) -> AbstractAsyncContextManager[None]: ...

    async def contended(self, after_s: float) -> None:
        """When somebody waits for another phase and this one has lasted so long."""
        ...

    @property
    def phase(self) -> str: ...

    @property
    def move_seconds(self) -> dict[str, float]:
        """Seconds spent so far, by move."""
        ...

    @property
    def move_bytes(self) -> dict[str, int]:
        """Bytes moved or freed so far, by move."""
        ...

    @property
    def timeline(self) -> Sequence[Entered]:
        """The last changes of phase."""
        ...

    def seconds_in(self) -> dict[str, float]:
        """Seconds in each phase so far, without those of its moves."""
        ...


class PhaseKeeper:
    """Colocated layout. A move that fails or exceeds `timeout_s` leaves the keeper BROKEN, naming the move."""

    def __init__(self, movable: Movable, start: Phase, timeout_s: float):
        self._movable = movable
        self._timeout_s = timeout_s
        self._gate: Gate[Phase] = Gate(start, self._enter, serves)
        self.move_seconds: dict[str, float] = {}
        self.move_bytes: dict[str, int] = {}
        self.timeline: deque[Entered] = deque(maxlen=TIMELINE)
        self._seconds_in: dict[str, float] = {}
        self._since = time.perf_counter()

    @property
    def phase(self) -> str:
        return "BROKEN" if self._gate.broken else str(self._gate.state)

    def hold(self, phase: Phase) -> AbstractAsyncContextManager[None]:
        return self._gate.hold(phase)

    async def contended(self, after_s: float) -> None:
        await asyncio.sleep(after_s - (time.perf_counter() - self._since))
        await self._gate.contended()

    def seconds_in(self) -> dict[str, float]:
        return self._seconds_in | {self.phase: self._seconds_in.get(self.phase, 0.0) + time.perf_counter() - self._since}

    async def _enter(self, current: Phase, wanted: Phase) -> None:
        began, at, moves = time.perf_counter(), time.time(), list[tuple[str, float, int]]()
        self._seconds_in[current] = self._seconds_in.get(current, 0.0) + began - self._since
        for move in plan_moves(current, wanted):
            started = time.perf_counter()
            try:
                moved = await asyncio.wait_for(self._movable.move(move, wanted), self._timeout_s)
            except TimeoutError:
                raise InternalError(f"'{move}' took longer than {self._timeout_s:.0f} s") from None
            except InternalError as error:
                raise InternalError(f"'{move}' failed: {error}") from error
            took = time.perf_counter() - started
            moves.append((str(move), took, moved))
            self.move_seconds[str(move)] = self.move_seconds.get(str(move), 0.0) + took
            self.move_bytes[str(move)] = self.move_bytes.get(str(move), 0) + moved
        self._since = time.perf_counter()
        self.timeline.append(Entered(at, str(wanted), self._since - began, tuple(moves)))


class SplitKeeper:
    """Trainers and engines on devices of their own: everything stays resident."""

    def __init__(self) -> None:
        self.move_seconds: dict[str, float] = {}
        self.move_bytes: dict[str, int] = {}
        self.timeline: deque[Entered] = deque()

    phase = "SPLIT"

    async def contended(self, after_s: float) -> None:
        await asyncio.get_running_loop().create_future()  # nobody ever does

    def seconds_in(self) -> dict[str, float]:
        return {}

    @asynccontextmanager
    async def hold(self, phase: Phase) -> AsyncGenerator[None]:
        yield
