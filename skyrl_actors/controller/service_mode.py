"""Whether the service accepts requests, and whether it starts them. Operators change it."""

from collections.abc import Callable

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
        for watcher in self._watchers:
            watcher(self.is_paused)

    @property
    def is_paused(self) -> bool:
        return self.mode == "paused"

    def check_accepts(self) -> None:
        """Raise Unavailable while the service is drained. SDKs retry for minutes."""
        if self.mode == "draining":
            raise Unavailable("the service is being drained and accepts nothing new; try again")
