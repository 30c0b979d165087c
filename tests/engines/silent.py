"""An engine of a pool without a process."""

from typing import Any

from skyrl_actors.engines.interface import EngineStatus
from skyrl_actors.engines.replica import EngineReplica


class Silent(EngineReplica):
    """An engine without a process."""

    async def take_over(self, actors: Any) -> bool:
        return False

    async def start(self) -> None:
        self._step("started")
        self._step("ready")

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any: ...
    async def status(self) -> EngineStatus:
        return EngineStatus(
            loaded_version="base", adapters=(), asleep=False, rss_bytes=0, running=0
        )

    async def _come_back(self) -> None:
        self._step("again")
        await self.start()

    async def close(self) -> None:
        await self.detach()
