"""The other process of a controller, which takes over when this one dies.

With `restart.standby_controller`, a controller has two processes of one kind. The journal decides
which of them is active; the other one has everything loaded and waits for the journal's lock. A
process that died is started again by Ray, and then waits. So each of them can be the active one.
"""

import asyncio
import logging
import os
from contextlib import suppress

from skyrl_actors import remote
from skyrl_actors.messages.errors import SkyrlActorsError
from skyrl_actors.remote import settled, typed_ray

log = logging.getLogger(__name__)
LOOK_S = 2.0
ANSWER_S = 10.0


def actor_names(service: str) -> tuple[str, str]:
    """Return the names of the actors of both processes."""
    return f"{service}:controller", f"{service}:controller:2"


def own_process() -> str:
    """Return a name of this process for operators."""
    return f"process {os.getpid()} on {os.uname().nodename}"


class Standby:
    """What the active process knows of the other one, the actor of this name."""

    def __init__(self, name: str):
        self.waiting: str | None = None  # the process, while it waits for the journal
        self._name = name

    async def follow(self, stands_still: bool) -> None:
        """Keep `waiting` up to date, and let a new process wait for the journal.

        `stands_still`: the process had the journal and is silent, so it is ended first.
        """
        if stands_still:  # or its machine is gone
            await self.end(restart=True)
        while True:
            self.waiting = await self._asked()
            await asyncio.sleep(LOOK_S)

    async def _asked(self) -> str | None:
        try:
            actor = await remote.ask(remote.named, self._name)
            if actor is None:
                return None
            async with asyncio.timeout(ANSWER_S):
                return await settled(actor.stand_by.remote())
        except (SkyrlActorsError, remote.RayError, TimeoutError) as error:
            log.info("the other process does not answer: %s", error)
            return None

    async def end(self, restart: bool) -> None:
        """Kill the process. `restart`: Ray starts it again. A failure is only logged."""
        self.waiting = None
        try:
            await remote.ask(self._kill, restart)
        except remote.RayError as error:
            log.warning("the other process was not ended: %s", error)

    def _kill(self, restart: bool) -> None:
        with suppress(ValueError):  # it is gone
            actor = typed_ray.get_actor(self._name, namespace=remote.NAMESPACE)
            typed_ray.kill(actor, no_restart=not restart)
