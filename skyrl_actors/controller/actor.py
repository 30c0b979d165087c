"""The controller as a named Ray actor."""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_actors import heap, remote
from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.backends.build import build_backend
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller import housekeeping
from skyrl_actors.controller.bounds import RESULT_MEMORY_BYTES
from skyrl_actors.controller.calls import ControllerCalls, ProcessCalls
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.standby import Standby, own_process
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.build import build_journal
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import SkyrlActorsError, Unavailable
from skyrl_actors.observe.process import Observed
from skyrl_actors.observe.spans import SPANS, Span
from skyrl_actors.remote import ended
from skyrl_actors.transport.protocols import methods_of
from skyrl_actors.transport.rpc import Address
from skyrl_actors.transport.rpc_server import RpcServer

log = logging.getLogger(__name__)
AFTER_FAILURE_S = 2.0
POLL_S = 1.0
ACTIVE_S = 10.0
YIELD_S = 1.0
HANG_UP_S = 0.2
OF_PROCESS = methods_of(ProcessCalls)


class ControllerActor:
    """The process of a controller: its start, its RPC server and its end.

    Calls of ingress replicas and jobs go to the started controller (`calls`).

    Ray restarts this actor with the same arguments when its process dies. The first call then
    starts the controller, which opens its journal and attaches to the ranks and engines that run.
    `base_folders` is by the name of a base model. `standby` is the name of the actor that takes
    over when this one dies, if there is one.
    """

    def __init__(
        self,
        config: ClusterConfig,
        base_folders: Mapping[str, str],
        detached: bool,
        standby: str | None = None,
    ):
        Observed(config.name, config.observe.otlp, config.observe.log_format).begin("controller")
        self.progress: list[str] = []
        self._arguments = (config, {n: Path(f) for n, f in base_folders.items()}, detached)
        self.controller = self.build_controller(*self._arguments)
        self._starting: asyncio.Task[ServedModels] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._standby = Standby(standby) if standby is not None else None
        self._following: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._rpc = RpcServer(self._part_for, ControllerCalls, unsent_bytes=RESULT_MEMORY_BYTES)

    def __repr__(self) -> str:
        """Return the name that Ray's dashboard and log lines show."""
        return f"{self._arguments[0].name} controller"

    def _report(self, text: str) -> None:
        self.progress.append(text)
        log.info(text)

    def build_controller(
        self, config: ClusterConfig, base_folders: Mapping[str, Path], detached: bool
    ) -> Controller:
        """Return a controller that has not started. A subclass can choose another backend."""
        return Controller(
            config,
            build_backend(config, base_folders, self._report, detached),
            build_journal(config.journal, KINDS),
        )

    async def start(self) -> ServedModels:
        """Start the controller once. All concurrent callers share the start and its failure.

        The next call after a failure tries again.
        """
        return await asyncio.shield(self._begin(wait=False))

    def _begin(self, wait: bool) -> asyncio.Task[ServedModels]:
        """Start the controller if it does not start already. `wait`: once it has the journal."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(wait))
        return self._starting

    async def _start(self, wait: bool) -> ServedModels:
        await ended(self._guarding)
        self._guarding = asyncio.create_task(self._end_when_deposed(self.controller.journal))
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._start_over)
            able = await self.controller.start(wait)
            undo.pop_all()
        heap.keep_present_objects()
        self._watching = asyncio.create_task(self._watch())
        if self._standby is not None:
            stands_still = self.controller.journal.ended_silent
            self._following = asyncio.create_task(self._standby.follow(stands_still))
        self._publishing = asyncio.create_task(self._publish(able.default.base_model))
        if self._standby is None:  # clients of a takeover do not wait for Ray's server
            await self._publishing
        return able

    async def _publish(self, base_model: str) -> None:
        url = self._url
        content = {"url": url, "openai_url": f"{url}/v1", "base_model": base_model}
        await remote.publish(self._arguments[0].name, content)

    async def _end_when_deposed(self, journal: Journal) -> None:
        """End this process when another one has the journal: ranks and engines are not its own."""
        while (deposed := journal.deposed) is None:  # noqa: ASYNC110  a plain attribute
            await asyncio.sleep(POLL_S)
        log.critical("this process ends: %s", deposed)
        os._exit(1)

    @property
    def _lost(self) -> str | None:
        return self.controller.journal.lost or self.controller.backend.lost

    async def _watch(self) -> None:
        """Rebuild the controller, ranks and engines when the journal or the backend is lost.

        The journal is lost when its database lost confirmed entries: ranks and engines may be
        ahead of it. The backend is lost when Ray does not place its slots.
        """
        while (lost := self._lost) is None:  # noqa: ASYNC110  plain attributes, without an event
            await asyncio.sleep(POLL_S)
        self._report(lost)
        await ended(self._following)
        await housekeeping.attempt(
            "the controller was not closed in order", self.controller.close()
        )
        if self._standby is not None:
            self._rpc.hang_up()
        self._starting = None
        self.controller = self.build_controller(*self._arguments)
        await self._begin(self._standby is not None)

    @property
    def _url(self) -> str:
        http = self._arguments[0].http
        if http.public_url:
            return http.public_url.rstrip("/")
        host = remote.node_address() if http.host in ("0.0.0.0", "::") else http.host
        return f"http://{host}:{http.port}"

    async def _start_over(self) -> None:
        await self.controller.abandon()
        await asyncio.sleep(AFTER_FAILURE_S)  # calls during the pause get this failure
        if self._standby is not None:  # it may be active now; callers hear why first
            asyncio.get_running_loop().call_later(HANG_UP_S, self._rpc.hang_up)
        self._starting = None
        self.controller = self.build_controller(*self._arguments)

    async def _ensure_started(self) -> None:
        """Start the controller if needed. Raises Unavailable, so that clients retry."""
        try:
            await asyncio.shield(self._begin(self._standby is not None))
        except SkyrlActorsError as error:
            raise Unavailable(f"the service does not start: {error}") from None

    async def _part_for(self, method: str) -> object:
        """Return the object that serves this method of `ControllerCalls`."""
        if method in OF_PROCESS:
            return self
        await self._ensure_started()
        return self.controller.part_for(method)

    async def get_rpc_address(self, caller: str) -> Address | None:
        """Return the address at which a process on that machine calls the other methods.

        None if this process is not active within `ACTIVE_S`; ask both processes again. The caller
        takes the first address, so a process that may have been replaced answers late.
        """
        if self._standby is not None:
            self._begin(wait=True)
            try:
                async with asyncio.timeout(ACTIVE_S):
                    await self.controller.opened.wait()
            except TimeoutError:
                return None
            if self.controller.journal.is_silent:
                await asyncio.sleep(YIELD_S)
        return await self._rpc.address_for(caller)

    async def stand_by(self) -> str:
        """Wait for the turn from now on, and return a name of this process."""
        self._begin(wait=True)
        return own_process()

    async def get_progress(self) -> list[str]:
        return self.progress

    async def fault(self) -> str | None:
        # If the actor was restarted, this can be its first call.
        self._begin(self._standby is not None)
        return self.controller.readiness.fault()

    def settings(self) -> ClusterConfig:
        """Return the configuration that the actor was created with."""
        return self._arguments[0]

    async def spans(self) -> list[Span]:
        """Return recent spans, oldest first."""
        return list(SPANS.recent)

    async def status(self) -> dict[str, Any]:
        content = await self.controller.status()
        content |= {"url": self._url, "process": own_process()}
        if self._standby is not None:
            content["standby"] = self._standby.waiting
            if self._standby.waiting is None:
                content["warning"] = content["warning"] or "no standby controller is ready"
        return content

    async def close(self) -> None:
        """Stop the service. A process that is not active only stops waiting."""
        await ended(self._watching, self._following, self._guarding, self._publishing)
        if self._standby is not None:
            if not self.controller.opened.is_set():
                return
            await self._standby.end(restart=False)
        await remote.publish(self._arguments[0].name, None)
        await self.controller.operators.end_drain()
        await self.controller.close()
        await self._rpc.close()
        await asyncio.to_thread(SPANS.close)


if TYPE_CHECKING:
    _: type[ProcessCalls] = ControllerActor
