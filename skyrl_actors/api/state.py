"""The state of all routes: the controller client, the config, and byte budgets."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request

from skyrl_actors.api import compression
from skyrl_actors.api.body_limits import SMALL_BYTES
from skyrl_actors.api.client import ControllerClient
from skyrl_actors.api.cpu_bound import run_in_thread, run_in_thread_if_large
from skyrl_actors.api.credentials import Credentials
from skyrl_actors.api.open_requests import MOST_DOWNLOADS, OpenRequests, most_of_owner
from skyrl_actors.backends.backend import Capabilities, ServedModels
from skyrl_actors.config.base_configs import BaseConfigs
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.messages.errors import CapacityError, InvalidRequest, SkyrlActorsError
from skyrl_actors.messages.keys import KeyTable
from skyrl_actors.messages.results import Failure
from skyrl_actors.transport.byte_budget import ByteBudget

HEALTH_TIMEOUT_S = 5.0
BODY_MEMORY_BYTES = 512 * 2**20  # of the large bodies that one process reads, and of the answers
LONG_POLL_S = 30.0  # longest time that one poll for an answer is held open
KNOWN_IDS = 100_000  # models and samplers whose base model one process stores
PATIENCE_S = 30.0  # how long a body waits for memory
ARCHIVES = "/api/v1/archives"  # links there are signed and need no key


class LogSource(Protocol):
    """The logs of a service's parts; `part_logs.PartLogs` implements it."""

    def parts(self) -> list[str]: ...

    def newest(self, part: str, lines: int) -> str: ...


@dataclass
class ApiState:
    """Shared by all routes of one application."""

    config: ClusterConfig
    client: ControllerClient
    logs: LogSource | None = None
    _bases: ServedModels | None = field(default=None)
    _base_of: dict[str, str] = field(default_factory=dict[str, str])
    configs: BaseConfigs = field(init=False)
    credentials: Credentials = field(init=False)
    body_budget: ByteBudget = field(init=False)  # for bodies that are read and decoded
    answer_budget: ByteBudget = field(init=False)  # for answers that are rendered and sent
    open_requests: OpenRequests = field(init=False)
    downloads: OpenRequests = field(init=False)
    folders: CheckpointFolders = field(init=False)
    long_poll_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.configs = BaseConfigs(self.config)
        self.credentials = Credentials(self.config.http.api_keys, self._fetch_keys)
        limit = max(BODY_MEMORY_BYTES, self.config.limits.body_bytes)
        self.body_budget, self.answer_budget = (
            ByteBudget(limit, SMALL_BYTES),
            ByteBudget(limit, SMALL_BYTES),
        )
        self.open_requests = OpenRequests(most_of_owner(self.config.http))
        self.downloads = OpenRequests(MOST_DOWNLOADS)
        self.folders = CheckpointFolders(self.config.checkpoint_dir)
        self.long_poll_s = LONG_POLL_S

    async def _fetch_keys(self, version: str) -> KeyTable | None:
        return await self.client.calls.known_keys(version)

    @property
    def known_bases(self) -> ServedModels | None:
        """The base models, or None before their first request."""
        return self._bases

    async def bases(self) -> ServedModels:
        if self._bases is None:
            self._bases = await self.client.calls.get_capabilities()
        return self._bases

    async def able_to_sample(self, sampler_id: str) -> Capabilities:
        """Return the base model of a sampler. Raises NotFound if there are several to ask for."""
        bases = await self.bases()
        if len(bases.names) == 1:
            return bases.default
        if sampler_id not in self._base_of:
            self._remember(sampler_id, (await self.client.calls.get_sampler(sampler_id)).base_model)
        return bases.of(self._base_of[sampler_id])

    async def able_to_train(self, model_id: str) -> Capabilities:
        """Return the base model of a model. Raises NotFound if there are several to ask for."""
        bases = await self.bases()
        if len(bases.names) == 1:
            return bases.default
        if model_id not in self._base_of:
            found = (await self.client.calls.get_model(model_id)).spec.base_model
            self._remember(model_id, found)
        return bases.of(self._base_of[model_id])

    def _remember(self, name: str, base_model: str) -> None:
        if len(self._base_of) >= KNOWN_IDS:
            self._base_of.clear()
        self._base_of[name] = base_model

    async def fault(self) -> str | None:
        """Return why a request would not be served now, or None when it would."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await self.client.once.fault()
        except TimeoutError:
            return f"the controller did not answer within {HEALTH_TIMEOUT_S:.0f} s"
        except SkyrlActorsError as error:
            return str(error)


def state_of(request: Request) -> ApiState:
    """Return the state of the application that received this request."""
    return request.app.state.api


def shown(state: ApiState, fault: Failure | Exception) -> str:
    """Return the text of a fault for a client.

    A fault of the service may quote the last log lines of a process, which may concern other
    tenants. With keys configured a client gets only the first line; operators find the rest in the
    log and in `status`.
    """
    text = fault.message if isinstance(fault, Failure) else str(fault)
    is_whole = not state.credentials.hide_faults or getattr(fault, "category", "server") == "user"
    return text if is_whole else text.partition("\n")[0]


async def read_body(request: Request, limit: int) -> bytes:
    """Return the decompressed body. The size is limited before and after decompression."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise compression.BodyTooLarge(
                f"the body has more than {limit} bytes; at most {limit} are allowed"
            )
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        size = await run_in_thread_if_large(len(body), compression.decompressed_bytes, body, limit)
        await make_room(request, size)
        return await run_in_thread(compression.decompress, body, limit)
    if encoding != "identity":
        raise InvalidRequest(f"content-encoding is {encoding!r}; use zstd or none")
    return body


async def make_room(request: Request, num_bytes: int) -> None:
    """Wait for the memory of a body's decoded bytes. Raises CapacityError."""
    try:
        await request.state.body_lease.exchange(num_bytes, PATIENCE_S)
    except TimeoutError:
        raise CapacityError(
            f"the body has {num_bytes} bytes when it is decoded, and other bodies are being "
            "read; try again later"
        ) from None
