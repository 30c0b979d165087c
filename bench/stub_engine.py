"""An engine of the pool without supervision: nothing starts, takes over or ends it."""

from typing import Any

from skyrl_actors.colocation.state_lock import StateLock
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.replica import EngineReplica


class StubEngine(EngineReplica):
    """A healthy engine with the base model's weights. Subclasses answer `ask`."""

    def __init__(self, name: str):
        super().__init__(name, RestartConfig(), lambda text: None)
        self.lock = StateLock(BASE_VERSION, nothing)
        self._step("started")
        self._step("ready")

    async def status(self) -> Any:
        raise NotImplementedError("benchmarks do not ask for it")

    async def start(self) -> None:
        """Do nothing: it runs."""

    async def take_over(self, actors: Any) -> bool:
        return True

    async def close(self) -> None:
        """Do nothing: its process is ended by the benchmark."""

    async def _come_back(self) -> None:
        """Do nothing: it does not die."""


async def nothing(*_: Any) -> None:
    """Deliver or load nothing."""
