"""Accept requests, order them, run them, and return their results. Imports no torch.

Consumes requests from ingress replicas and jobs. Produces one result for each accepted request.
HTTP and the computation of a verb belong to other packages. Accepted requests are in the journal.
Another controller on the same journal continues them.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from skyrl_actors import clock
from skyrl_actors.backends.backend import Backend, ServedModels
from skyrl_actors.config.base_configs import BaseConfigs
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller import bounds, housekeeping, mirroring, overview, startup
from skyrl_actors.controller.administration import Administration
from skyrl_actors.controller.answers import Answers
from skyrl_actors.controller.audit_log import AuditLog
from skyrl_actors.controller.calls import (
    AnswerCalls,
    AuditCalls,
    KeyCalls,
    OperatorCalls,
    ServiceCalls,
    UsageCalls,
)
from skyrl_actors.controller.checkpoints import folders_of
from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.disk import Disk, whose
from skyrl_actors.controller.examine import Examiner
from skyrl_actors.controller.free_space import FreeSpace
from skyrl_actors.controller.key_store import KeyStore
from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.metering import Metering
from skyrl_actors.controller.model_capacity import ModelCapacity
from skyrl_actors.controller.named_samplers import NamedSamplers
from skyrl_actors.controller.operators import Operators
from skyrl_actors.controller.quota_store import QuotaStore
from skyrl_actors.controller.readiness import Readiness
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.resumption import Resumption
from skyrl_actors.controller.router_replay import RouterReplay
from skyrl_actors.controller.samples import Samples
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.session_end import SessionEnd
from skyrl_actors.controller.session_start import SessionStart
from skyrl_actors.controller.standby import own_process
from skyrl_actors.controller.storage_quota import StorageQuota
from skyrl_actors.controller.submission import Submission
from skyrl_actors.controller.tasks import Tasks
from skyrl_actors.controller.tenants import Model, Sampler, TenantTable
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.journal.entries import SessionEnded
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.catalog import CatalogVerb, SessionLabels, SessionVerb
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_id
from skyrl_actors.remote import ended
from skyrl_actors.transport.protocols import methods_of

log = logging.getLogger(__name__)
SWEEP_S = 300.0  # between removals of entries older than journal.retention_s


class Controller:
    """Accept requests and return their results; `actor.ControllerActor` runs it as a Ray actor.

    `wall` returns the wall-clock time in seconds.
    """

    def __init__(
        self,
        config: ClusterConfig,
        backend: Backend,
        journal: Journal,
        wall: Callable[[], float] = clock.now,
    ):
        self.config = config
        self.backend = backend
        self.journal = journal
        self.tenants = tenants = TenantTable()
        self.sweep_s = SWEEP_S
        self.admin = admin = Administration(config, journal, wall)
        self.queue = bounds.queue_of(config.limits, self.admin.quotas.weight)
        self.results = bounds.results_of()
        self.epoch = 0
        self.opened = asyncio.Event()  # the journal is open
        self.wall, self.started_at = wall, wall()
        self._closing = False
        self.folders = folders = folders_of(config, wall)
        self._space = FreeSpace(
            {"journal": config.journal.folder, "checkpoints": folders.root},
            config.limits,
            folders.checkpoints,
        )
        self.readiness = Readiness(backend, journal, self._space)
        self._meter = Metering(self.admin, self._space, wall)
        self._sessions = SessionCatalog(self.tenants, folders, wall)
        self.completions = Completions()
        self._ledger = Ledger(
            journal=journal,
            queue=self.queue,
            results=self.results,
            memory=bounds.payloads_of(config),
            completions=self.completions,
            meter=self._meter,
            wall=wall,
        )
        self._disk = Disk()
        self._replayer = Replayer(config, backend, journal, self.tenants, folders, self._disk)
        self._tasks = Tasks()
        configs = BaseConfigs(config)
        self._capacity = ModelCapacity(
            config, configs, tenants, self.finish_session, self._tasks.spawn, admin, backend.waiting
        )
        self._context = VerbContext(
            config=config,
            configs=configs,
            backend=backend,
            tenants=self.tenants,
            folders=folders,
            disk=self._disk,
            capacity=self._capacity,
            past=self._replayer,
            routes=RouterReplay(config, configs, self.tenants, journal, self._tasks),
            admin=self.admin,
            storage=StorageQuota(self.admin.quotas, folders, self._disk),
        )
        self._build_parts()

    def _build_parts(self) -> None:
        """Build the objects that act on the tables."""
        self._examiner = Examiner()
        self._samples = Samples(self._ledger, self._context, self._replayer, self._tasks)
        self._lanes = Lanes(self._ledger, self._context, self._replayer, self._samples, self._tasks)
        self._named_samplers = NamedSamplers(self._context, self.journal, self._samples.retire)
        self._submission = Submission(
            self._context, self._ledger, self._lanes, self._samples, self._examiner, self._replayer
        )
        self._resumption = Resumption(
            self._context, self._ledger, self._lanes, self._samples, self._tasks
        )
        self._session_start = SessionStart(
            self.tenants, self._sessions, self.journal, self._disk, self._meter, self.wall
        )
        self._session_end = SessionEnd(self._context, self._ledger, self._lanes, self._samples)
        self.operators = Operators(
            self._context, self._ledger, self._lanes, self._samples, self.finish_session
        )
        self.answers = Answers(self._context, self._ledger, self.readiness)
        parts: tuple[tuple[type, object], ...] = (
            (AnswerCalls, self.answers),
            (KeyCalls, self.admin.keys),
            (UsageCalls, self.admin.usage),
            (AuditCalls, self.admin.log),
            (OperatorCalls, self.operators),
        )
        self._parts = {method: part for calls, part in parts for method in methods_of(calls)}

    async def start(self, wait: bool = False) -> ServedModels:
        """Open the journal, attach to ranks and engines that run, and resume open requests.

        If another process has the journal, raises ConfigError, or waits for its end.
        """
        standing_by = asyncio.create_task(self.backend.stand_by()) if wait else None
        try:
            journal_state = await self.journal.open(
                f"service {self.config.name!r} ({own_process()})", wait
            )
        finally:
            await ended(standing_by)
        self.epoch = journal_state.epoch
        self.opened.set()
        await self.admin.begin(journal_state)
        await mirroring.begin(self.folders.alignment, self._disk)
        able = await self.backend.start(journal_state.epoch)
        self._meter.base_model = able.default.base_model
        self.completions.begin(journal_state.epoch)
        unanswered = await startup.load_tables(
            journal_state, self._ledger, self.tenants, self._replayer
        )
        self._context.routes.begin(journal_state.next_number)
        startup.check_base(self.tenants, able.names)
        # Only once the tables are complete: before, a model would be restored to an older position.
        self.backend.on_lost = self._bring_back_role
        self.readiness.capabilities = able
        await self._resumption.run(unanswered, able)
        timeout_s = self.config.limits.session_timeout_s
        for task in (
            housekeeping.free_silent_sessions(self.tenants, self.finish_session, timeout_s),
            self._space.follow(self._disk),
            mirroring.follow(self.folders.alignment, self._disk),
            self.admin.recent.follow(lambda: self.queue.num_open),
            self._named_samplers.free_unused(timeout_s),
            housekeeping.sweep(self._context, self._sessions, self.journal, self.sweep_s),
        ):
            self._tasks.spawn(task)
        return able

    def _bring_back_role(self, base_model: str, role: str) -> None:
        for model in self.tenants.models.values():
            is_of_it = model.spec.role == role and model.spec.base_model in (base_model, "")
            if is_of_it and model.ready and not self._closing:
                self._tasks.spawn(self._lanes.bring_back(model, None))

    def part_for(self, method: str) -> object:
        """Return the object that serves this method of the started controller."""
        return self._parts.get(method, self)

    async def create_session(
        self,
        session_id: str | None = None,
        labels: SessionLabels | None = None,
    ) -> str:
        """Create a session and return its id. Idempotent by id."""
        self.readiness.check_started()
        session_id = checked_id(session_id or f"s{uuid.uuid4().hex[:16]}", "session id")
        await self._session_start.open(session_id, labels or SessionLabels(), self._now)
        return session_id

    async def heartbeat(self, session_id: str) -> None:
        """Mark a session as active. Raises NotFound for an unknown session."""
        self.readiness.check_started()
        self.tenants.mark_active(self.tenants.session(session_id).session_id, self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def finish_session(
        self, session_id: str, how: str | None = None, detail: str | None = None
    ) -> None:
        """Free a session's models and samplers, and fail its queued requests. Idempotent.

        `how` is the client's own account of how the session ended, if the client sent one.
        """
        if how is not None:
            await self._disk.write("few files", self._sessions.finished, session_id, how, detail)
        if session_id in self.tenants.sessions:
            await self._ledger.write_until_stored(SessionEnded(session_id, self.wall()))
            self.tenants.sessions.pop(session_id, None)
        await self._session_end.free(session_id)

    async def submit(self, request: rq.Request, request_id: str | None = None) -> str:
        """Accept a request durably and return its id; the work happens later.

        The same `request_id` again is the same request. Raises UserError or Unavailable; then
        nothing was accepted.
        """
        return await self._submission.submit(request, request_id, self.readiness.able)

    async def cancel_sample(self, request_id: str) -> None:
        """Cancel a sample that is not answered yet. Unknown ids and other verbs are ignored."""
        self._samples.cancel(request_id, "cancelled by its client")

    async def join_sampler(self, sampler_id: str) -> int:
        """Return a number that no other copy of this sampler's client has."""
        return self._named_samplers.join(sampler_id, self.wall())

    async def open_sampler(
        self,
        sampler_id: str | None,
        session_id: str | None,
        base_model: str | None,
        path: str | None,
    ) -> Sampler:
        """Open a sampler of the base model or of a checkpoint. Idempotent by id.

        Raises UserError for an unknown base model or path.
        """
        base = await self._named_samplers.base_of(base_model, path, self.readiness.able)
        return await self._named_samplers.open(sampler_id, session_id, base, path)

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec:
        """Return the model that a checkpoint or a past step belongs to."""
        return await self._submission.checkpoint_spec(path)

    async def get_capabilities(self) -> ServedModels:
        return self.readiness.able

    async def get_sampler(self, sampler_id: str) -> Sampler:
        return self.tenants.sampler(sampler_id)

    async def get_model(self, model_id: str) -> Model:
        return self.tenants.model(model_id)

    async def catalog(self, verb: CatalogVerb, *arguments: Any) -> Any:
        """Call a method of `CheckpointFolders` on a thread."""
        if verb != "copy":
            return await self._disk.catalog(self.folders, verb, *arguments)
        room = self._context.storage.room_for_copy
        async with room(arguments[0], arguments[1], self._meter.check_accepts):
            return await self._disk.catalog(self.folders, verb, *arguments)

    async def session_catalog(self, verb: SessionVerb, *arguments: Any) -> Any:
        """Call a method of `SessionCatalog` on a thread."""
        return await self._disk.listing(
            whose(verb, *arguments), getattr(self._sessions, verb), *arguments
        )

    async def status(self) -> dict[str, Any]:
        """Return the state of the controller and its backend as JSON values."""
        backend = await self.backend.status() if self.readiness.capabilities else {}
        return {
            "name": self.config.name,
            "ready": self.readiness.capabilities is not None,
            "fault": self.readiness.fault(),
            "epoch": self.epoch,
            "mode": self.admin.mode.mode,
            "disk": self._space.status(),
            "warning": self._space.warning() or self.folders.alignment.away,
            **self._capacity.status(),
            "uptime_s": round(self.wall() - self.started_at, 1),
            **overview.of(self.tenants, self.queue, self._replayer, self.admin.keys.label),
            **backend,
        }

    async def close(self) -> None:
        """Stop, and end the ranks and engines."""
        await self._end(self.backend.close)

    async def abandon(self) -> None:
        """Stop, and leave ranks and engines running for the next controller."""
        await self._end(self.backend.detach)

    async def _end(self, end_backend: Callable[[], Awaitable[None]]) -> None:
        self._closing = True
        self._examiner.close()
        await self._tasks.close()
        await self._replayer.close()
        await end_backend()
        await self.journal.close()


if TYPE_CHECKING:
    _: type[ServiceCalls] = Controller
    _of_keys: type[KeyCalls] = KeyStore
    _of_usage: type[UsageCalls] = QuotaStore
    _of_operators: type[OperatorCalls] = Operators
    _of_audit: type[AuditCalls] = AuditLog
