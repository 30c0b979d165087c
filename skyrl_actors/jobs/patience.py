"""Submit a request again until the controller accepts it."""

import asyncio
import logging
import uuid

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.messages.errors import CapacityError, SkyrlActorsError, Unavailable
from skyrl_actors.messages.requests import Request, Sample

log = logging.getLogger(__name__)
RETRY_S = 2.0


async def submitted(client: ControllerClient, request: Request) -> str:
    """Send a request, and return its id without waiting for the result.

    A controller that accepts nothing, for example because the disk of its journal is full, may
    accept requests later. So does one that has as many open samples as it may have. The job
    therefore tries again every RETRY_S seconds.
    """
    passing: tuple[type[SkyrlActorsError], ...] = (Unavailable,)
    if isinstance(request, Sample):
        passing = (Unavailable, CapacityError)
    request_id = f"r{uuid.uuid4().hex}"
    while True:
        try:
            return await client.submit(request, request_id=request_id)
        except passing as error:
            log.warning("the controller accepts no requests; trying again: %s", error)
            await asyncio.sleep(RETRY_S)
