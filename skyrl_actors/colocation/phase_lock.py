"""Control what is resident on the devices.

`hold(phase)` is the only call that moves memory. If trainers and engines share devices, one phase
is held at a time. On separate devices all memory stays, and `hold` returns at once. Callers use
both the same way.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.colocation.phases import RESIDENT, Move, Phase, after_move, plan_from, serves
from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.messages.errors import InternalError

TIMELINE = 1000  # changes of phase that are kept
log = logging.getLogger(__name__)


class Movable(Protocol):
    """The owner of the memory, which the phase lock moves."""

    async def move(self, move: Move, to: Phase) -> int | None:
        """Carry out one move on the way to phase `to`.

        Returns the bytes that it moved or freed; None if no part was up to carry it out.
        """
        ...

    def restart_now(self, move: Move, everything: bool, reason: str) -> None:
        """Restart the parts that did not finish `move`, or `everything` that shares the devices.

        Called after `move` failed or was cancelled. On return, all parts that still run have
        finished the move. Restarted parts rejoin in a phase that has room for their memory.
        """
        ...


class MoveFailed(InternalError):
    """A move failed and its remedy has begun; the next try is in `pause_s`."""

    def __init__(self, text: str, pause_s: float):
        super().__init__(text)
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """One change of phase."""

    at: float  # Unix time of its start
    phase: str
    seconds: float
    moves: tuple[tuple[str, float, int], ...]  # (move, seconds, bytes)


class PhaseLock(Protocol):
    """Holds phases of memory on the devices."""

    def hold(self, phase: Phase) -> AbstractAsyncContextManager[None]: ...

    async def contended(self, after_s: float) -> None:
        """Return when another phase is requested and this one has lasted `after_s`."""
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

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds in each phase so far, without those of its moves."""
        ...

    def fault(self) -> str | None:
        """Return the error of a failed move that requests wait for, or None."""
        ...

    @property
    def failures(self) -> dict[str, dict[str, Any]]:
        """For each move that ever failed: total and consecutive failures, and the last error."""
        ...


class ColocatedPhaseLock:
    """The phase lock for shared devices; it retries failed moves.

    If a move fails or exceeds `timeout_s`, the parts that failed restart. Requests for the phase
    wait until the next try; holders get no error.
    """

    def __init__(
        self, movable: Movable, start: Phase, timeout_s: float, healing: MoveHealing | None = None
    ):
        self._movable = movable
        self._timeout_s = timeout_s
        self._healing = healing or MoveHealing()
        self._resident = RESIDENT[start]  # current memory, also halfway between two phases
        self._failed = False  # the last change of phase failed
        self._error = ""
        self._lock: StateLock[Phase] = StateLock(
            start, self._enter, self._serves, retry=self._pause_s
        )
        self.move_seconds: dict[str, float] = {}
        self.move_bytes: dict[str, int] = {}
        self.timeline: deque[Entered] = deque(maxlen=TIMELINE)
        self._phase_seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    @property
    def phase(self) -> str:
        return "HEALING" if self._failed else str(self._lock.state)

    def hold(self, phase: Phase) -> AbstractAsyncContextManager[None]:
        return self._lock.hold(phase)

    async def contended(self, after_s: float) -> None:
        await asyncio.sleep(after_s - (time.perf_counter() - self._since))
        await self._lock.contended()

    def phase_seconds(self) -> dict[str, float]:
        return self._phase_seconds | {
            self.phase: self._phase_seconds.get(self.phase, 0.0) + time.perf_counter() - self._since
        }

    def fault(self) -> str | None:
        if advice := self._healing.advice():
            return advice
        if self._failed or self._lock.resting:
            return f"memory is moved again after a failure: {self._error}"
        return None

    @property
    def failures(self) -> dict[str, dict[str, Any]]:
        return {move: asdict(failures) for move, failures in self._healing.moves.items()}

    def _serves(self, current: Phase, wanted: Phase) -> bool:
        return self._resident == RESIDENT[current] and serves(current, wanted)

    def _pause_s(self, wanted: Phase, error: Exception) -> float:
        return error.pause_s if isinstance(error, MoveFailed) else self._healing.longest_pause_s

    async def _enter(self, current: Phase, wanted: Phase) -> None:
        began, at, moves = time.perf_counter(), time.time(), list[tuple[str, float, int]]()
        self._phase_seconds[self.phase] = (
            self._phase_seconds.get(self.phase, 0.0) + began - self._since
        )
        try:
            for move in plan_from(self._resident, wanted):
                started = time.perf_counter()
                moved = await self._carry_out(move, wanted)
                took = time.perf_counter() - started
                moves.append((str(move), took, moved))
                self.move_seconds[str(move)] = self.move_seconds.get(str(move), 0.0) + took
                self.move_bytes[str(move)] = self.move_bytes.get(str(move), 0) + moved
        finally:
            self._since = time.perf_counter()
        self._failed = False
        self.timeline.append(
            Entered(at=at, phase=str(wanted), seconds=self._since - began, moves=tuple(moves))
        )

    async def _carry_out(self, move: Move, to: Phase) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                moved = await self._movable.move(move, to)
        except TimeoutError:
            raise self._healed(move, f"'{move}' took longer than {self._timeout_s:g} s") from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the event loop ends
            raise self._healed(move, f"'{move}' was cancelled") from error
        except Exception as error:
            raise self._healed(move, f"'{move}' failed: {error}") from error
        self._resident = after_move(self._resident, move)
        if moved is not None:  # None proves nothing: no part was up to carry it out
            self._healing.succeeded(str(move))
        return moved or 0

    def _healed(self, move: Move, reason: str) -> MoveFailed:
        """Begin the remedy of a failed move; return the error to raise.

        The move counts as done: parts that did not finish it restart, and take part in no move
        until they are up again.
        """
        remedy = self._healing.failed(str(move), reason)
        self._resident = after_move(self._resident, move)
        self._failed, self._error = True, reason
        again = "all that shares the devices" if remedy.everything else "what failed"
        log.error(
            "%s; %s restarts, and the move is tried again in %.1f s", reason, again, remedy.pause_s
        )
        self._movable.restart_now(move, remedy.everything, reason)
        return MoveFailed(reason, remedy.pause_s)


class SplitPhaseLock:
    """The phase lock for separate devices: everything stays resident."""

    def __init__(self) -> None:
        self.move_seconds: dict[str, float] = {}
        self.move_bytes: dict[str, int] = {}
        self.timeline: deque[Entered] = deque()
        self.failures: dict[str, dict[str, Any]] = {}

    phase = "SPLIT"

    async def contended(self, after_s: float) -> None:
        await asyncio.get_running_loop().create_future()  # never resolved: phases never compete

    def phase_seconds(self) -> dict[str, float]:
        return {}

    def fault(self) -> str | None:
        return None

    @asynccontextmanager
    async def hold(self, phase: Phase) -> AsyncGenerator[None]:
        yield
