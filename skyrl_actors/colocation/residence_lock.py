"""Hold base models on the devices while requests use them, and move the others away.

`hold(base)` waits until the base model is on the device. `Residency` decides; this module waits,
and carries out one step at a time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import Context
from typing import Any

from skyrl_actors.colocation.residency import Residency, Step
from skyrl_actors.messages.errors import ConfigError, InternalError, SkyrlActorsError, UserError
from skyrl_actors.supervision.backoff import pause_after

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
Carry = Callable[[Step], Awaitable[None]]


class ResidenceLock:
    """Admit requests of base models that are on the device.

    `carry` carries out a step. After `attempts` failures in a row of one base model, the requests
    that wait for it get the error, and later ones cause another attempt. UserError and ConfigError
    are not retried.
    """

    def __init__(self, residency: Residency, carry: Carry, attempts: int):
        self.residency = residency
        self._carry = carry
        self._attempts = attempts
        self._waiters: dict[str, deque[asyncio.Future[None]]] = {}
        self._failures: dict[str, int] = {}
        self._errors: dict[str, str] = {}
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False

    def open(self) -> None:
        """Begin to move base models. Before that, requests wait."""
        self._is_open = True
        self._advance()

    @asynccontextmanager
    async def hold(self, base: str) -> AsyncGenerator[None]:
        """Hold a base model on the device. Raises what made its last move fail."""
        await self._acquire(base)
        try:
            yield
        finally:
            self.residency.leave(base, self._now())
            self._advance()

    def wait_s(self, base: str) -> float | None:
        """Estimate how long a request of this base model waits now; None if none does."""
        if not self._waiters.get(base):
            return None
        return self.residency.wait_s(base, self._now())

    def fault(self, base: str) -> str | None:
        """Return why a base model cannot be brought to the device, or None."""
        return self._errors.get(base)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return place, requests and the seconds of the last moves of each base model."""
        return {
            base.name: {
                "place": str(base.place),
                "running": base.users,
                "waiting": base.waiting,
                "move_seconds": {move: round(s, 3) for move, s in base.move_s.items()},
                "fault": self._errors.get(base.name),
            }
            for base in self.residency.bases.values()
        }

    async def carry_out(self, step: Step) -> None:
        """Carry out one step before `open`. Raises what makes it fail."""
        began = self._now()
        self.residency.begin(step)
        try:
            await self._carry(step)
        except BaseException:
            self.residency.fail(step, self._now(), 0.0)
            raise
        self.residency.end(step, self._now(), self._now() - began)

    async def close(self) -> None:
        """Stop moving. Requests that wait are cancelled by their callers."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _acquire(self, base: str) -> None:
        if self.residency.arrive(base, self._now()):
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(base, deque())
        waiters.append(ticket)
        self._advance()
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket in waiters:
                waiters.remove(ticket)
                self.residency.give_up(base)
            elif not ticket.cancelled() and ticket.exception() is None:
                self.residency.leave(base, self._now())
            self._advance()
            raise

    def _advance(self) -> None:
        """Begin the next step, or set the timer for the next look."""
        if not self._is_open or self._running is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        found = self.residency.next(self._now())
        if isinstance(found, Step):
            self.residency.begin(found)
            self._running = asyncio.create_task(self._run(found), context=Context())
        elif found is not None:
            pause_s = max(found - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._advance)

    async def _run(self, step: Step) -> None:
        began = self._now()
        carried = asyncio.sleep(0) if step.action == "stay" else self._carry(step)
        (error,) = await asyncio.gather(carried, return_exceptions=True)
        if isinstance(error, BaseException):
            self._failed(step, error, self._now() - began)
        else:
            self._failures.pop(step.base, None)
            self._errors.pop(step.base, None)
            self._admit(step.base, self.residency.end(step, self._now(), self._now() - began))
        self._running = None
        self._advance()

    def _admit(self, base: str, count: int) -> None:
        for _ in range(count):
            ticket = self._waiters[base].popleft()
            if ticket.done():  # its request was cancelled a moment ago
                self.residency.leave(base, self._now())
            else:
                ticket.set_result(None)

    def _failed(self, step: Step, error: BaseException, seconds: float) -> None:
        failures = self._failures[step.base] = self._failures.get(step.base, 0) + 1
        # A base model that cannot be loaded must not take the devices for most of the time.
        pause_s = max(pause_after(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S), seconds)
        self._errors[step.base] = f"{step.action} failed: {error}"
        log.error("base model %s: %s failed: %s", step.base, step.action, error)
        self.residency.fail(step, self._now(), pause_s)
        is_final = isinstance(error, UserError | ConfigError) or failures >= self._attempts
        if not is_final or step.action not in ("load", "wake"):
            return
        self._failures.pop(step.base)
        known = error if isinstance(error, SkyrlActorsError) else InternalError(str(error))
        waiters = self._waiters.get(step.base, deque())
        while waiters:
            self.residency.give_up(step.base)
            ticket = waiters.popleft()
            if not ticket.done():
                ticket.set_exception(known)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
