"""The controller as a detached, named Ray actor."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from skyrl_actors import remote
from skyrl_actors.backends.base import Capabilities
from skyrl_actors.backends.build import build_backend
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller import housekeeping
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.tenants import Model, Sampler
from skyrl_actors.journal.build import build_journal
from skyrl_actors.line import Address, LineServer
from skyrl_actors.messages.catalog import CatalogVerb, SessionVerb
from skyrl_actors.messages.errors import SkyrlActorsError, Unavailable
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Completion, PartialSample, Result, Waiting
from skyrl_actors.observe.process import Observed
from skyrl_actors.observe.spans import SPANS, Span

log = logging.getLogger(__name__)
AFTER_FAILURE_S = 2.0
LOOK_S = 1.0
CALLS = (
    "get_capabilities",
    "create_session",
    "heartbeat",
    "finish_session",
    "submit",
    "retrieve",
    "open_sampler",
    "get_sampler",
    "get_model",
    "checkpoint_spec",
    "catalog",
    "session_catalog",
    "partial",
    "cancel_sample",
    "completed",
    "join_sampler",
    "fault",
    "status",
    "spans",
)
"""What may be called over the line."""


class ControllerActor:
    """Methods are what ingress replicas and jobs may call; see `Controller` for what they do.

    Ray makes this actor anew when its process dies, with the same arguments. The first call then starts it: it takes up
    its journal and the ranks and engines that still run.
    """

    def __init__(self, config: ClusterConfig, base_folder: str, detached: bool):
        Observed(config.name, config.observe.otlp, config.observe.log_format).begin("controller")
        self.progress: list[str] = []
        self._parts = (config, Path(base_folder), detached)
        self.controller = self._build()
        self._starting: asyncio.Task[Capabilities] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._line = LineServer(self, CALLS)

    def __repr__(self) -> str:
        """In Ray's dashboard and before its lines of the log."""
        return f"{self._parts[0].name} controller"

    def _say(self, text: str) -> None:
        self.progress.append(text)
        log.info(text)

    def _build(self) -> Controller:
        config, base_folder, detached = self._parts
        return Controller(config, build_backend(config, base_folder, self._say, detached), build_journal(config.journal))

    async def start(self) -> Capabilities:
        """Once, whoever asks first. A start that failed fails for all who wait, and whoever asks next tries again."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Capabilities:
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._start_over)
            able = await self.controller.start()
            undo.pop_all()
        self._watching = asyncio.create_task(self._reopen_when_lost())
        await remote.publish(
            self._parts[0].name, {"url": self._url, "openai_url": f"{self._url}/v1", "base_model": able.base_model}
        )
        return able

    async def _reopen_when_lost(self) -> None:
        """A database that lost what was confirmed: ranks and engines may be ahead of it, so they are made anew."""
        while (lost := self.controller.journal.lost) is None:  # noqa: ASYNC110  it is a plain attribute
            await asyncio.sleep(LOOK_S)
        self._say(lost)
        await housekeeping.attempt("the controller was not closed in order", self.controller.close())
        self._starting = None
        self.controller = self._build()
        await self.start()

    @property
    def _url(self) -> str:
        http = self._parts[0].http
        if http.public_url:
            return http.public_url.rstrip("/")
        return f"http://{remote.node_address() if http.host in ('0.0.0.0', '::') else http.host}:{http.port}"

    async def _start_over(self) -> None:
        await self.controller.abandon()
        await asyncio.sleep(AFTER_FAILURE_S)  # whoever asks meanwhile hears of this failure
        self._starting = None
        self.controller = self._build()

    async def _up(self) -> None:
        """For calls of clients, to whom a failing start is a passing fault."""
        try:
            await self.start()
        except SkyrlActorsError as error:
            raise Unavailable(f"the service does not start: {error}") from None

    async def get_line(self, caller: str) -> Address:
        """Where a process on that machine calls the rest directly."""
        return await self._line.address_for(caller)

    async def get_progress(self) -> list[str]:
        return self.progress

    async def get_capabilities(self) -> Capabilities:
        await self._up()
        return self.controller.able

    async def create_session(self, session_id: str, user_metadata: dict[str, str], display_name: str | None) -> str:
        await self._up()
        return await self.controller.create_session(session_id, user_metadata, display_name)

    async def heartbeat(self, session_id: str) -> None:
        await self._up()
        self.controller.heartbeat(session_id)

    async def finish_session(self, session_id: str, how: str | None, detail: str | None) -> None:
        await self._up()
        await self.controller.finish_session(session_id, how, detail)

    async def submit(self, request: Request, request_id: str) -> str:
        await self._up()
        # Its caller may give up waiting; then it is accepted, or not, all the same.
        return await asyncio.shield(asyncio.ensure_future(self.controller.submit(request, request_id)))

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | Waiting:
        await self._up()
        return await self.controller.retrieve(request_id, timeout_s) or self.controller.waiting(request_id)

    async def open_sampler(
        self, sampler_id: str | None, session_id: str | None, base_model: str | None, path: str | None
    ) -> Sampler:
        await self._up()
        return await self.controller.open_sampler(sampler_id, session_id, base_model, path)

    async def get_sampler(self, sampler_id: str) -> Sampler:
        await self._up()
        return self.controller.tenants.sampler(sampler_id)

    async def get_model(self, model_id: str) -> Model:
        await self._up()
        return self.controller.tenants.model(model_id)

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec:
        await self._up()
        return await self.controller.checkpoint_spec(path)

    async def catalog(self, verb: CatalogVerb, *arguments: Any) -> Any:
        await self._up()
        return await self.controller.catalog(verb, *arguments)

    async def session_catalog(self, verb: SessionVerb, *arguments: Any) -> Any:
        await self._up()
        return await self.controller.session_catalog(verb, *arguments)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample | Result:
        await self._up()
        return await self.controller.partial(request_id, have, timeout_s)

    async def cancel_sample(self, request_id: str) -> None:
        await self._up()
        self.controller.cancel_sample(request_id)

    async def completed(self, sampler_id: str, clone: int, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        await self._up()
        return await self.controller.completed(sampler_id, clone, cursor, timeout_s)

    async def join_sampler(self, sampler_id: str) -> int:
        await self._up()
        return self.controller.join_sampler(sampler_id)

    async def fault(self) -> str | None:
        if self._starting is None:  # made anew, and nobody else has asked for anything yet
            self._starting = asyncio.create_task(self._start())
        return self.controller.fault()

    def settings(self) -> ClusterConfig:
        """What it was started with."""
        return self._parts[0]

    async def spans(self) -> list[Span]:
        """What was done lately, oldest first."""
        return list(SPANS.recent)

    async def status(self) -> dict[str, Any]:
        return {**await self.controller.status(), "url": self._url}

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await remote.publish(self._parts[0].name, None)
        await self.controller.close()
        await self._line.close()
        await asyncio.to_thread(SPANS.close)
