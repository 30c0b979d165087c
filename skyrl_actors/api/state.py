"""What every route needs: the controller client, the config, and the request body within its bounds."""

import asyncio
from dataclasses import dataclass, field

from fastapi import Request

from skyrl_actors.api import codec
from skyrl_actors.api.apart import run_in_thread
from skyrl_actors.api.body_room import BodyRoom
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.backends.base import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.keys import known_keys
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.messages.errors import SkyrlActorsError
from skyrl_actors.messages.results import Failure

HEALTH_TIMEOUT_S = 5.0
ARCHIVES = "/api/v1/archives"  # links there are signed and need no key


@dataclass
class ApiState:
    config: ClusterConfig
    client: ControllerClient
    _capabilities: Capabilities | None = field(default=None)
    owners: dict[str, str] = field(init=False)  # hash of an API key -> its owner
    body_room: BodyRoom = field(init=False)
    folders: CheckpointFolders = field(init=False)

    def __post_init__(self) -> None:
        self.owners = {key.digest: key.owner for key in known_keys(self.config.http.api_keys)}
        self.body_room = BodyRoom(self.config.limits.body_memory_bytes)
        self.folders = CheckpointFolders(self.config.checkpoint_dir)

    @property
    def known_capabilities(self) -> Capabilities | None:
        """None until they were asked for once."""
        return self._capabilities

    async def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            self._capabilities = await self.client.capabilities()
        return self._capabilities

    async def fault(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        try:
            return await asyncio.wait_for(self.client.fault(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return f"the controller did not answer within {HEALTH_TIMEOUT_S:.0f} s"
        except SkyrlActorsError as error:
            return str(error)


def state_of(request: Request) -> ApiState:
    return request.app.state.api


def shown(state: ApiState, fault: Failure | Exception) -> str:
    """What a client is told of a fault. What follows the first line of a fault of the service are the last lines of a process, which
    may be about other tenants: with keys configured they are for operators, in the log and in `status`."""
    text = fault.message if isinstance(fault, Failure) else str(fault)
    is_whole = not state.owners or getattr(fault, "category", "server") == "user"
    return text if is_whole else text.partition("\n")[0]


async def read_body(request: Request, limit: int) -> bytes:
    """The body, decompressed; bounded before and after."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise codec.BodyTooLarge(f"the body has more than {limit} bytes, the most this service takes")
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await run_in_thread(codec.decompress, body, limit)
    if encoding != "identity":
        raise codec.InvalidRequest(f"content-encoding {encoding!r}: use zstd or none")
    return body
