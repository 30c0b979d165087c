"""What a catalogue needs of the backend of one base model, and of what builds it."""

from typing import Protocol

from skyrl_actors.backends.backend import Backend, Capabilities
from skyrl_actors.colocation.residency import Residency


class ParkableBackend(Backend, Protocol):
    """The backend of one base model, whose memory can leave the devices."""

    async def take_over(self, epoch: int) -> Capabilities | None:
        """Park what an earlier controller left. Return None, with nothing left, if it is broken."""
        ...

    async def park(self) -> None: ...

    async def resume(self) -> None: ...


class BaseModelFactory(Protocol):
    """What all base models of a service have in common, before any of them is loaded."""

    @property
    def lost(self) -> str | None:
        """Why the slots must be reserved again, or None."""
        ...

    async def stand_by(self) -> None:
        """Look for what runs until cancelled."""
        ...

    async def reserve(self) -> Residency:
        """Reserve the slots. Return all base models, on disk. Raises ConfigError."""
        ...

    def build(self, name: str) -> ParkableBackend:
        """Return a backend of a base model, which is not started."""
        ...

    def known(self, name: str) -> Capabilities | None:
        """Return what an earlier start has found out about a base model, or None."""
        ...

    async def learn(self, able: Capabilities) -> None:
        """Store what a loaded base model can do."""
        ...

    async def detach(self) -> None: ...

    def release(self) -> None:
        """Free the slots."""
        ...
