"""Let the samples of a silent session wait for the next sign of life of its client.

A client that died sends no heartbeat. Its samples would keep engines busy while others wait.
Samples are repeated with their seed, so a client that comes back gets the same answers later.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from skyrl_actors.controller.tenants import TenantTable

log = logging.getLogger(__name__)
SILENT_S = 30.0  # three heartbeats
CHECK_S = 1.0


class FellSilent(Exception):
    """The session of a sample is silent."""


class Presence:
    """The tasks that run for sessions, and which sessions are silent.

    While `drains` is true, none is: all accepted samples are to be answered.
    """

    def __init__(
        self, tenants: TenantTable, drains: Callable[[], bool], silent_s: float = SILENT_S
    ):
        self._tenants = tenants
        self._drains = drains
        self._silent_s = silent_s
        self._running: dict[str, set[asyncio.Task[object]]] = {}  # by session
        self._fell_silent: set[asyncio.Task[object]] = set()  # cancelled by this object
        self._silent: dict[str, asyncio.Event] = {}  # set at a sign of life, or at the end

    async def heard(self, session_id: str | None) -> None:
        """Wait while the session is silent."""
        if session_id in self._silent:  # it may have sent something since the last check
            self.check(asyncio.get_running_loop().time())
        while (event := self._silent.get(session_id or "")) is not None:
            await event.wait()

    @asynccontextmanager
    async def present(self, session_id: str | None) -> AsyncGenerator[None]:
        """Run for a session. Raises FellSilent as soon as the session is silent."""
        task = asyncio.current_task()
        if session_id is None or task is None:
            yield
            return
        running = self._running.setdefault(session_id, set())
        running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._fell_silent:
                raise
            self._fell_silent.discard(task)
            if task.uncancel():
                raise  # somebody else has cancelled it too
            raise FellSilent from None
        finally:
            if task in self._fell_silent:  # it ended although it was cancelled
                self._fell_silent.discard(task)
                task.uncancel()
            running.discard(task)
            if not running:
                self._running.pop(session_id, None)

    async def follow(self) -> None:
        """Look for silent sessions, in an endless loop."""
        while True:
            self.check(asyncio.get_running_loop().time())
            await asyncio.sleep(CHECK_S)

    def check(self, now: float) -> None:
        """Stop the samples of sessions that are silent now; wake those with a new sign of life."""
        silent = (
            set[str]()
            if self._drains()
            else set(self._tenants.silent_sessions(now, self._silent_s))
        )
        for session_id in self._silent.keys() - silent:
            self._silent.pop(session_id).set()
        for session_id in silent - self._silent.keys():
            self._silent[session_id] = asyncio.Event()
            tasks = self._running.get(session_id, set()) - self._fell_silent
            if tasks:
                log.warning(
                    "session %s is silent: %d samples wait for its client", session_id, len(tasks)
                )
            for task in tasks:
                self._fell_silent.add(task)
                task.cancel()
