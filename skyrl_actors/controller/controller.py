"""What runs next. One object, no torch: it accepts requests, keeps their order, runs them, and answers who waits.

Consumes: requests from ingress replicas and jobs. Produces: one result for each accepted request. Knows nothing of HTTP
or of how a verb is computed. What it promised is in its journal; another controller on the same journal goes on.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from skyrl_actors import clock
from skyrl_actors.backends.base import Backend, Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller import admission, bounds, housekeeping, overview, restart
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.digests import digest_of
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.examine import Examiner
from skyrl_actors.controller.execute import Executor
from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import LONGEST_PAUSE_S, Ledger, Op, Outcome
from skyrl_actors.controller.named_samplers import NamedSamplers
from skyrl_actors.controller.recovery import Progress, Recovery
from skyrl_actors.controller.room import Room
from skyrl_actors.controller.session_catalog import SessionCatalog
from skyrl_actors.controller.tenants import Model, Sampler, Session, TenantTable
from skyrl_actors.journal import encoding
from skyrl_actors.journal.base import Journal
from skyrl_actors.journal.entries import SessionEnded, SessionOpened
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.catalog import CatalogVerb, SessionNote, SessionVerb
from skyrl_actors.messages.errors import Corrupt, InternalError, InvalidRequest, NotFound, Unavailable
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_id, parse_path
from skyrl_actors.messages.results import Completion, Failure, PartialSample, Result, Waiting
from skyrl_actors.messages.seeds import seeded

log = logging.getLogger(__name__)
FIRST_JOIN_S = 1_750_000_000  # the SDK multiplies the number by 10^9 and keeps it in 64 bits


class Controller:
    def __init__(self, config: ClusterConfig, backend: Backend, journal: Journal, wall: Callable[[], float] = clock.now):
        self.config = config
        self.backend = backend
        self.journal = journal
        self.tenants = TenantTable()
        self.queue = bounds.queue_of(config.limits)
        self.results = bounds.results_of(config.limits)
        self.started_at = wall()
        self.capabilities: Capabilities | None = None
        self.epoch = 0
        self.wall = wall
        self._closing = False
        self._last_joined = 0
        folders = CheckpointFolders(config.checkpoint_dir, wall, config.checkpoint_mirror)
        self._sessions = SessionCatalog(self.tenants, folders, wall)
        memory = bounds.payloads_of(config.limits)
        self.completions = Completions()
        self._ledger = Ledger(
            journal=journal, queue=self.queue, results=self.results, memory=memory, completions=self.completions, wall=wall
        )
        self._disk = Disk()
        self._recovery = Recovery(config, backend, journal, self.tenants, folders, self._disk)
        self._executor = Executor(config, backend, self.tenants, folders, self._disk, self._recovery.fork)
        self._examiner = Examiner()
        self._room = Room(config, self.tenants, self.finish_session, lambda work: self._lanes.spawn(work))
        self._lanes = Lanes(self._ledger, self.tenants, self._executor, self._recovery, self.completions, self._room)
        self._named_samplers = NamedSamplers(self.tenants, self._executor, journal, self._lanes.retire)

    async def start(self) -> Capabilities:
        """Take the journal, the parts that run already, and up what an earlier controller owed."""
        holder = f"service {self.config.name!r} (process {os.getpid()} on {os.uname().nodename})"
        books = await self.journal.open(holder)
        self.epoch = books.epoch
        await self._disk.write("whole checkpoints", self._executor.folders.align)
        able = await self.backend.start(books.epoch)
        self.completions.begin(books.epoch)
        owed = await restart.take_up(books, self._ledger, self.tenants, self._recovery)
        # Not before the tables are full: a model would be restored to where it stood half-way through them.
        self.backend.on_lost = self._bring_back_role
        self.capabilities = able
        await self._resume(owed)
        timeout_s, keep = self.config.limits.session_timeout_s, self.config.journal
        self._lanes.spawn(housekeeping.free_silent_sessions(self.tenants, self.finish_session, timeout_s))
        self._lanes.spawn(self._named_samplers.free_unused(timeout_s))
        folders = self._executor.folders
        self._lanes.spawn(housekeeping.sweep(folders, self._sessions, self.journal, keep.sweep_s, keep.retention_s))
        return able

    async def _resume(self, owed: list[Op]) -> None:
        """Order: who is gone is freed, who lives is restored, then what is owed runs."""
        residents = await self.backend.residents()
        for model_id in residents.keys() - self.tenants.models.keys():
            for role in self.able.roles:
                with suppress(InternalError):  # ranks that are made anew do not hold it
                    await self.backend.delete_model(ModelSpec(model_id, self.able.base_model, role))
        self._room.begin(self.able, residents)
        for sampler in list(self.tenants.samplers.values()):
            if sampler.session_id is not None and sampler.session_id not in self.tenants.sessions:
                await self._lanes.retire(sampler)
        for model_id, model in self.tenants.models.items():
            if model.ready:
                self._lanes.spawn(self._lanes.bring_back(model, residents.get(model_id, -1)))
        for op in owed:
            session_id = op.header.session_id if op.header else None
            if session_id is not None and session_id not in self.tenants.sessions:
                if op.line is not None:
                    self.queue.drain(op.line)
                text = f"session {session_id} was finished before this ran"
                self._lanes.spawn(self._ledger.answer(op, Outcome(Failure(text, "user"))))
            elif op.line is None:
                self._lanes.spawn(self._resume_sample(op))
            elif op.line not in self.tenants.models or not self.tenants.models[op.line].ready:
                self._lanes.start_next(op.line)

    async def _resume_sample(self, op: Op) -> None:
        try:
            self._lanes.start_sample(op, self.tenants.sampler(op.stream))
        except NotFound as error:
            await self._ledger.answer(op, Outcome(Failure.of(error)))

    def _bring_back_role(self, role: str) -> None:
        for model in self.tenants.models.values():
            if model.spec.role == role and model.ready and not self._closing:
                self._lanes.spawn(self._lanes.bring_back(model, None))

    @property
    def able(self) -> Capabilities:
        if self.capabilities is None:
            raise Unavailable("the service is still starting; try again")
        return self.capabilities

    async def create_session(
        self, session_id: str | None = None, user_metadata: dict[str, str] | None = None, display_name: str | None = None
    ) -> str:
        """Idempotent by id."""
        self.able  # noqa: B018  not before the journal is open
        session_id = checked_id(session_id or f"s{uuid.uuid4().hex[:16]}", "session id")
        if session_id not in self.tenants.sessions:
            admission.check_count(self.tenants.sessions, session_id, self.config.limits.sessions_per_key, "sessions")
            admission.check_metadata(user_metadata or {})
            note = SessionNote(session_id, self.wall(), dict(user_metadata or {}), display_name)
            await self._disk.write("few files", self._sessions.opened, note)
            await self.journal.write(SessionOpened(session_id, note.user_metadata, note.created_at))
            self.tenants.sessions[session_id] = Session(session_id, self.tenants.silence.hear(self._now()), note.user_metadata)
        return session_id

    def heartbeat(self, session_id: str) -> None:
        self.able  # noqa: B018  an unknown session is over only when it is known who is here
        self.tenants.hear(self.tenants.session(session_id).session_id, self._now())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def finish_session(self, session_id: str, how: str | None = None, detail: str | None = None) -> None:
        """Free a session's models and samplers; what it had queued fails. Finishing twice is fine. `how`: the client says it ended."""
        if how is not None:
            await self._disk.write("few files", self._sessions.finished, session_id, how, detail)
        if session_id in self.tenants.sessions:
            await self._ledger.insist(SessionEnded(session_id, self.wall()))
            self.tenants.sessions.pop(session_id, None)
        unloads: list[str] = []
        models = [model.spec.model_id for model in self.tenants.models_of(session_id)]
        for model_id in models:
            for request_id in self.queue.drain(model_id):
                text = f"session {session_id} was finished before this ran"
                op = self._ledger.ops[request_id]
                # Its line is another's by now: it only leaves the open ones.
                await self._ledger.answer(replace(op, line=None), Outcome(Failure(text, "user")))
            self._room.withdraw(model_id, f"session {session_id} was finished before this ran")
        await self._lanes.retire_samplers_of(session_id)  # weights that somebody may sample are written before they go
        for model_id in models:
            op = await self._accepted_unload(model_id, session_id)
            self._lanes.start_next(model_id)
            unloads.append(op.request_id)
        for request_id in unloads:
            if request_id in self.results:  # else it was answered a while ago
                await self.results.wait(request_id, self.config.policy.call_timeout_s)
        await self._lanes.retire_samplers_of(
            session_id
        )  # again: a save that was running when the session ended has left its sampler too
        self.tenants.forget_expired(session_id)

    async def _accepted_unload(self, model_id: str, session_id: str) -> Op:
        """The session is gone already, so this may not be given up."""
        while True:
            try:
                return await self._ledger.accept(rq.Unload(model_id), model_id, None, model_id, session_id, bounded=False)
            except Unavailable:
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def submit(self, request: rq.Request, request_id: str | None = None) -> str:
        """Accept a request and answer its id, which is durable; the work happens later. Raises UserError or Unavailable
        and then nothing was accepted. The same `request_id` again is the same request."""
        self.able  # noqa: B018
        admission.check_seq_id(getattr(request, "seq_id", None))
        if request_id is not None and self._ledger.knows(request_id):
            return await self._ledger.accepted_before(request_id)
        if isinstance(request, rq.Sample):
            return await self._submit_sample(request, request_id)
        if isinstance(request, rq.CreateModel):
            return await self._submit_create(request, request_id)
        model = self.tenants.model(request.model_id)
        if isinstance(request, rq.SaveForSampler):
            self.tenants.policy(request.model_id)
        self.tenants.hear(model.session_id, self._now())
        request, digest = await self._examiner.examined(request, model.spec, self.config, self.able)
        model_id, seq_id = request.model_id, getattr(request, "seq_id", None)
        if (known := await self._ledger.known(model_id, seq_id, digest, request_id)) is not None:
            return known
        self.tenants.model(model_id)  # its session may have ended meanwhile
        op = await self._ledger.accept(
            request, model_id, seq_id, model_id, model.session_id, digest=digest, request_id=request_id
        )  # fmt: skip
        if isinstance(request, rq.Unload):
            self._room.withdraw(model_id, f"model {model_id} was unloaded before there was room for it")
        self._lanes.start_next(model_id)
        return op.request_id

    async def _submit_create(self, request: rq.CreateModel, request_id: str | None) -> str:
        """The id of the model is the client's (session and number), so a repeat of it is a retry."""
        self.tenants.session(request.session_id)
        admission.check_metadata(request.user_metadata)
        encoding.check(request)
        model_id = checked_id(request.model_id, "model id")
        digest = digest_of(request)
        if (known := await self._ledger.known(model_id, 0, digest, request_id)) is not None:
            return known
        spec = admission.settled(request.spec, self.able)
        if request.from_path:
            spec = replace(await self._saved_spec(request.from_path, request.with_optimizer), model_id=model_id)
            # Meanwhile the same request may have come again, or the session may have ended.
            if (known := await self._ledger.known(model_id, 0, digest, request_id)) is not None:
                return known
            self.tenants.session(request.session_id)
        admission.check_spec(spec, self.config, self.able)
        self._room.check_key(model_id)
        request = replace(request, spec=spec)
        self.tenants.models[model_id] = Model(spec, request.session_id, request.user_metadata)
        with ExitStack() as undo:
            undo.callback(self.tenants.models.pop, model_id, None)
            accepted = self._ledger.accept(
                request, model_id, 0, model_id, request.session_id, digest=digest, request_id=request_id
            )
            op = await accepted
            undo.pop_all()
        self._recovery.progress[model_id] = Progress(op.number)
        self._lanes.start_next(model_id)
        return op.request_id

    async def _saved_spec(self, path: str, with_optimizer: bool) -> ModelSpec:
        where = parse_path(path)
        if with_optimizer and where.kind == "sampler_weights":
            raise InvalidRequest(f"{path} has no optimizer state; only tinker://<model id>/weights/<name> does")
        return await self.checkpoint_spec(where)

    async def _submit_sample(self, request: rq.Sample, request_id: str | None) -> str:
        request, digest = await self._examiner.examined(request, None, self.config, self.able)
        if (known := await self._ledger.known(request.sampler_id, request.seq_id, digest, request_id)) is not None:
            return known
        sampler = self.tenants.sampler(request.sampler_id)
        self.tenants.hear(sampler.session_id, self._now())
        request_id = request_id or f"r{uuid.uuid4().hex}"
        request = seeded(request, request_id)
        sampler.users += 1  # while it is written: its files must stay
        try:
            op = await self._ledger.accept(
                request, request.sampler_id, request.seq_id, None, sampler.session_id, digest=digest, request_id=request_id
            )  # fmt: skip
            self._lanes.start_sample(op, sampler)
        finally:
            await self._lanes.release(sampler)
        return op.request_id

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | None:
        """None when it is not ready in time. Raises NotFound for an id that is unknown or swept."""
        if request_id in self.results:
            self._heard_of(request_id)
            return await self.results.wait(request_id, timeout_s)
        self.able  # noqa: B018
        operation = await self.journal.find(request_id)
        if operation is None or operation.answered_at is None or operation.result is None:
            raise NotFound(f"request {request_id!r} is not known here (answers are kept for journal.retention_s)")
        try:
            return await self.journal.result(operation)
        except Corrupt as error:  # final: asking again would not mend it
            return Failure.of(error)

    def _heard_of(self, request_id: str) -> None:
        """A client that waits for an answer is not silent."""
        op = self._ledger.ops.get(request_id)
        asks = op and (self.tenants.models.get(op.line or "") or self.tenants.samplers.get(op.stream))
        if asks:
            self.tenants.hear(asks.session_id, self._now())

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample | Result:
        """What came of a streamed sample behind its first `have` tokens, or its answer when that is there."""
        if request_id not in self.results:
            return await self.retrieve(request_id, 0) or PartialSample()
        answer = asyncio.ensure_future(self.results.wait(request_id, timeout_s))
        growing = asyncio.ensure_future(self.backend.partial(request_id, have, timeout_s))
        try:
            await asyncio.wait([answer, growing], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return growing.result()
            self.backend.end_stream(request_id)
            return answer.result() or PartialSample()
        finally:
            answer.cancel()
            growing.cancel()

    def cancel_sample(self, request_id: str) -> None:
        """It fails, unless it was answered before; what is unknown or trains is left alone."""
        self._lanes.cancel_sample(request_id)

    async def completed(self, sampler_id: str, clone: int, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        self.able  # noqa: B018
        self.tenants.sampler(sampler_id)
        await self._ledger.recall.stream(sampler_id)
        return await self.completions.after(sampler_id, clone, cursor, timeout_s)

    def join_sampler(self, sampler_id: str) -> int:
        """A number that no other copy of this sampler's client has: seconds, so that a restart needs no memory of it."""
        self.tenants.sampler(sampler_id)
        self._last_joined = max(self._last_joined + 1, int(self.wall()) - FIRST_JOIN_S)
        return self._last_joined

    def waiting(self, request_id: str = "") -> Waiting:
        """What to tell a client whose answer is not there yet."""
        if (no_room := self._room.reason(request_id)) is not None:
            return Waiting("paused_capacity", no_room)
        if self.capabilities is None:
            return Waiting.paused("starting")
        if self.journal.trouble:
            return Waiting.paused("recording")
        return Waiting() if self.fault() is None else Waiting.paused("recovering")

    async def open_sampler(
        self, sampler_id: str | None, session_id: str | None, base_model: str | None, path: str | None
    ) -> Sampler:  # fmt: skip
        """Idempotent by id. Raises UserError for an unknown base model or path."""
        able = self.able
        if base_model is None and path is None:
            raise InvalidRequest("name a base_model or a model_path to sample from")
        if base_model is not None and base_model != able.base_model:
            raise InvalidRequest(f"unknown base model {base_model!r}; this service has {able.base_model!r}")
        return await self._named_samplers.open(sampler_id, session_id, able.base_model, path)

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec:
        if path.kind == "steps":
            return await self._recovery.spec_of_step(path)
        return await self._disk.read(self._executor.folders.spec, path)

    async def catalog(self, verb: CatalogVerb, *arguments: Any) -> Any:
        return await self._disk.catalog(self._executor.folders, verb, *arguments)

    async def session_catalog(self, verb: SessionVerb, *arguments: Any) -> Any:
        return await self._disk.run("listings", getattr(self._sessions, verb), *arguments)

    def fault(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        if self.capabilities is None:
            return "the service is still starting"
        if self.journal.trouble:
            return f"the journal can not write: {self.journal.trouble}"
        return self.backend.fault()

    async def status(self) -> dict[str, Any]:
        backend = await self.backend.status() if self.capabilities else {}
        mine = {"name": self.config.name, "ready": self.capabilities is not None, "fault": self.fault(), "epoch": self.epoch}
        uptime_s = round(self.wall() - self.started_at, 1)
        mine |= self._room.status()
        return {**mine, "uptime_s": uptime_s, **overview.of(self.tenants, self.queue, self._recovery), **backend}

    async def close(self) -> None:
        await self._end(self.backend.close)

    async def abandon(self) -> None:
        """Stop without ending anything that another controller can take over."""
        await self._end(self.backend.detach)

    async def _end(self, end_backend: Callable[[], Awaitable[None]]) -> None:
        self._closing = True
        self._examiner.close()
        await self._lanes.close()
        await self._recovery.close()
        await end_backend()
        await self.journal.close()
