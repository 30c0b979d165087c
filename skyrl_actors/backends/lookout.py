"""What runs of a service, as a controller finds it that stands by.

Ray's server can be lost together with the active controller. The standby then takes over what it
found before, because ranks and engines can be called without that server.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from placement.types import DoesNotFit
from skyrl_actors import remote
from skyrl_actors.backends.site import Site, standing_sites
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import SkyrlActorsError

log = logging.getLogger(__name__)
LOOK_S = 10.0
PATIENCE_S = 1.0  # Ray's server answers within milliseconds
# A cluster can change while it is looked at.
UNCLEAR = (remote.RayError, SkyrlActorsError, DoesNotFit, LookupError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Found:
    """What runs of a service. `sites` is by the name of a base model."""

    sites: Mapping[str, Site]
    actors: remote.Actors

    def actors_of(self, prefix: str) -> remote.Actors:
        """Return those whose names start with `prefix`."""
        return {name: actor for name, actor in self.actors.items() if name.startswith(prefix)}


class Lookout:
    """Look for what runs of a service, and keep it for a time without Ray's server."""

    def __init__(self, config: ClusterConfig):
        self._config = config
        self._found: Found | None = None
        self._asked: asyncio.Task[object] | None = None
        self._asked_until = 0.0

    async def follow(self) -> None:
        """Look again every `LOOK_S`. What was found last is kept while Ray's server is away."""
        while True:
            try:
                self._found = await self._look()
            except UNCLEAR:
                log.warning("what runs of the service was not found", exc_info=True)
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> Found | None:
        before = self._found or Found({}, {})
        sites = await standing_sites(self._config, before.sites)
        actors = await remote.ask(remote.living, f"{self._config.name}:")
        for name, actor in actors.items():
            if before.actors.get(name) != actor:
                actor.__ray_ready__.remote()  # its address is asked for at the first call
        return Found(sites, actors) if sites else None

    async def if_server_is_away(self) -> Found | None:
        """Return what was found last if Ray's server does not answer now. None: ask the server."""
        if self._found is None:
            return None
        now = asyncio.get_running_loop().time()
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(remote.ask(remote.published, self._config.name))
            self._asked_until = now + PATIENCE_S
        done, _ = await asyncio.wait({self._asked}, timeout=max(0.0, self._asked_until - now))
        if done and self._asked.exception() is None:
            return None
        log.warning("Ray's server does not answer; taking over what ran before")
        return self._found
