"""Whether the service accepts requests, and whether it starts them. Operators change it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.operating import Mode

PAUSED = "paused: an operator has paused the service; requests are kept and run later"


class ServiceMode:
    """The mode of one controller. The journal keeps it over a restart."""

    def __init__(self) -> None:
        self.mode: Mode = "running"
        self._watchers: list[Callable[[bool], None]] = []

    def watch(self, watcher: Callable[[bool], None]) -> None:
        """Call `watcher` with whether nothing may start, after each change."""
        self._watchers.append(watcher)

    def set(self, mode: Mode) -> None:
        """Use a mode from now on."""
        self.mode = mode
        for watcher in list(self._watchers):
            watcher(self.is_paused)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncGenerator[None]:
        """Raise TimeoutError after a time in which pauses do not count."""
        loop, left_s = asyncio.get_running_loop(), seconds
        async with asyncio.timeout(seconds) as deadline:

            def follow(is_paused: bool) -> None:
                nonlocal left_s
                ends = deadline.when()
                if deadline.expired():
                    return
                if is_paused and ends is not None:
                    left_s = ends - loop.time()
                    deadline.reschedule(None)
                elif not is_paused and ends is None:
                    deadline.reschedule(loop.time() + left_s)

            follow(self.is_paused)
            self._watchers.append(follow)
            try:
                yield
            finally:
                self._watchers.remove(follow)

    @property
    def is_paused(self) -> bool:
        return self.mode == "paused"

    def check_accepts(self) -> None:
        """Raise Unavailable while the service is drained. SDKs retry for minutes."""
        if self.mode == "draining":
            raise Unavailable("the service is being drained and accepts nothing new; try again")
