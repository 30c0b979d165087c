"""Whether the service answers requests now, and if not, why."""

from skyrl_actors.backends.backend import Backend, ServedModels
from skyrl_actors.controller.free_space import FreeSpace
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.results import Pause
from skyrl_actors.observe.counts import COUNTS


class Readiness:
    """The state of one controller. `capabilities` is None until it has started."""

    def __init__(self, backend: Backend, journal: Journal, space: FreeSpace):
        self.capabilities: ServedModels | None = None
        self._backend = backend
        self._journal = journal
        self._space = space
        COUNTS.watch("serving", lambda: float(self.fault() is None))

    @property
    def able(self) -> ServedModels:
        if self.capabilities is None:
            raise Unavailable("the service is still starting; try again")
        return self.capabilities

    def check_started(self) -> None:
        """Raise Unavailable before the start: until the journal is read, every id is unknown."""
        self.able  # noqa: B018

    def fault(self) -> str | None:
        """Return why requests are not served now, or None when they are."""
        if self.capabilities is None:
            return "the service is still starting"
        if self._journal.trouble:
            return f"the journal cannot write: {self._journal.trouble}"
        return self._space.fault() or self._backend.fault()

    def pause(self) -> Pause | None:
        """Return the state that a client shows while it waits, or None when requests are served."""
        if self.capabilities is None:
            return "starting"
        if self._journal.trouble or self._space.fault():
            return "recording"
        return None if self.fault() is None else "recovering"
