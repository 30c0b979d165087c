"""Keep one part of a service alive: attach or start, restart after a death, give up after many.

A group of ranks is one part, because its ranks compute together. An engine is one part.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import Context

from skyrl_actors import remote
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.supervision.backoff import RestartLimit
from skyrl_actors.supervision.health import Event, Health, after


class Supervisor(ABC):
    """The health and restarts of one part. `on_change` runs on each change of health.

    `on_restarted` runs after each restart.
    """

    def __init__(self, name: str, restart: RestartConfig, report: Callable[[str], None]):
        self.name = name
        self.health: Health = "STARTING"
        self.reason: str | None = None
        self.restarts = 0
        self.restart = restart
        self.on_change: Callable[[], None] = lambda: None
        self.on_restarted: Callable[[], None] = lambda: None
        self._report = report
        self._limit = RestartLimit(restart)
        self._changed = asyncio.Event()
        self._restarting: asyncio.Task[None] | None = None
        self._detached = False  # supervision has stopped; an exit is expected

    @abstractmethod
    async def take_over(self, actors: remote.Actors) -> bool:
        """Attach to the part as an earlier controller left it; return whether it runs.

        `actors` are those of the service that live.
        """

    @abstractmethod
    async def start(self) -> None:
        """Start the part; on return it is HEALTHY."""

    @abstractmethod
    async def _come_back(self) -> None:
        """Restart the part until HEALTHY. Raise InternalError if this attempt failed."""

    @abstractmethod
    async def close(self) -> None:
        """Stop supervision and end the part."""

    async def log_tail(self) -> str:
        """Return the last lines that the part logged before it died."""
        return ""

    @property
    def down(self) -> str | None:
        """The reason why the part does not serve, or None when it is HEALTHY."""
        return None if self.health == "HEALTHY" else self.reason or self.health.lower()

    @property
    def given_up(self) -> bool:
        return self.health == "DEAD" and (self._restarting is None or self._restarting.done())

    async def until_healthy(self) -> None:
        """Wait until the part serves, after a restart if necessary.

        Raises InternalError with the last reason when the restarts were given up.
        """
        while self.health != "HEALTHY":
            self.restart_if_dead()
            if self.given_up:
                raise InternalError(f"{self.name} keeps dying and was given up: {self.reason}")
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_settled(self) -> None:
        """Wait until no restart is in progress."""
        while self._restarting is not None and not self._restarting.done():
            await asyncio.wait([self._restarting])

    def _step(self, event: Event) -> None:
        self.health = after(self.health, event)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self.on_change()

    def start_later(self) -> None:
        """Start in the background; the other parts do not wait for it."""
        self.reason = "it did not run when the controller started"
        self._step("died")
        self.restart_if_dead()

    def worked(self) -> None:
        """Reset the count of deaths after a success."""
        self._limit.succeeded()

    def died(self, reason: str) -> None:
        """Restart the part after it died or hung. Repeated reports of one death are ignored."""
        if self.health == "DEAD":
            return
        self.reason = reason
        self._step("died")
        if not self._detached:
            self._report(f"lost {self.name}: {reason}")
            self.restart_if_dead()

    def restart_now(self, reason: str) -> None:
        """End the part at once and restart it; this does not count as a death."""
        self._limit.succeeded()
        self.died(reason)

    def restart_if_dead(self) -> None:
        """Restart a dead part, unless a restart runs or the restart limit is reached."""
        if (
            self._detached
            or self.health != "DEAD"
            or (self._restarting is not None and not self._restarting.done())
        ):
            return
        if self._limit.may_try_again(asyncio.get_running_loop().time()):
            self._restarting = asyncio.create_task(self._restart_loop(), context=Context())

    async def _restart_loop(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            log_tail = await self.log_tail()
            while (pause_s := self._limit.died(loop.time())) is not None:
                await asyncio.sleep(pause_s)
                # Whatever it raises: a part that is not started again would be waited for for ever.
                (error,) = await asyncio.gather(self._come_back(), return_exceptions=True)
                if error is not None:
                    is_known = isinstance(error, ConfigError | InternalError)
                    self.reason = str(error) if is_known else repr(error)
                    self._report(f"{self.name} did not start: {self.reason}")
                    if self.health != "DEAD":
                        self._step("died")
                    continue
                self.restarts += 1
                if self.health != "DEAD":  # otherwise it died again before this task ended
                    self.on_restarted()
                    return
            self.reason = f"{self.reason}\n{log_tail}".strip()
            self._report(f"{self.name} is given up: {self.reason}")
        finally:
            # Waiters check `given_up`, which is true only after this task ended.
            loop.call_soon(self._notify)

    async def detach(self) -> None:
        """Stop supervision and restarts. The part continues."""
        self._detached = True
        await remote.ended(self._restarting)
