"""What runs next. One object, no torch: it accepts requests, keeps their order, runs them, and answers who waits.

Consumes: requests from ingress replicas and jobs. Produces: one result for each accepted request. Knows nothing of HTTP
or of how a verb is computed.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_actors.backends.base import Backend, Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller import admission
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.execute import Executor
from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.tenants import Model, Sampler, Session, TenantTable
from skyrl_actors.controller.waiters import ResultTable
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import InternalError, InvalidRequest, SkyrlActorsError, UserError
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_id, parse_path
from skyrl_actors.messages.results import Failure, Result

log = logging.getLogger(__name__)


class Controller:
    def __init__(self, config: ClusterConfig, backend: Backend):
        self.config = config
        self.backend = backend
        self.tenants = TenantTable()
        self.queue = RequestQueue(config.limits.open_requests)
        self.results = ResultTable(config.limits.result_ttl_s)
        self.started_at = time.time()
        self.capabilities: Capabilities | None = None
        self._executor = Executor(config, backend, self.tenants, CheckpointFolders(Path(config.checkpoint_dir)))
        self._requests: dict[str, rq.Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sample_slots = asyncio.Semaphore(config.limits.samples_in_flight)

    async def start(self) -> Capabilities:
        self.capabilities = await self.backend.start()
        self._spawn(self._free_silent_sessions())
        return self.capabilities

    @property
    def able(self) -> Capabilities:
        if self.capabilities is None:
            raise InternalError("the service is still starting; try again")
        return self.capabilities

    def create_session(self, user_metadata: dict[str, str] | None = None) -> str:
        session_id = f"s{uuid.uuid4().hex[:16]}"
        self.tenants.sessions[session_id] = Session(session_id, time.monotonic(), dict(user_metadata or {}))
        return session_id

    def heartbeat(self, session_id: str) -> None:
        self.tenants.session(session_id).last_seen = time.monotonic()

    async def finish_session(self, session_id: str) -> None:
        """Free the models and samplers of a session; what it had queued fails. Finishing twice is fine."""
        self.tenants.sessions.pop(session_id, None)
        unloads = []
        for model in self.tenants.models_of(session_id):
            model_id = model.spec.model_id
            for request_id in self.queue.drain(model_id):
                del self._requests[request_id]
                self.results.resolve(request_id, Failure(f"session {session_id} was finished before this ran", "user"))
            unloads.append(self._accept(rq.Unload(model_id), model_id, None, model_id, bounded=False))
        for request_id in unloads:
            await self.results.wait(request_id, self.config.policy.call_timeout_s)
        # Only now: a save that was running when the session ended has left its sampler too.
        for sampler in self.tenants.samplers_of(session_id):
            self.queue.forget(sampler.sampler_id)
            await self._executor.retire(sampler)
        self.tenants.forget_expired(session_id)

    def submit(self, request: rq.Request) -> str:
        """Accept a request and answer its id; the work happens later. Raises UserError and then nothing was accepted."""
        if isinstance(request, rq.Sample):
            return self._submit_sample(request)
        if isinstance(request, rq.CreateModel):
            return self._submit_create(request)
        self.heartbeat_of(request.model_id)
        digest = admission.digest_of(request)
        seq_id = getattr(request, "seq_id", None)
        if (known := self.queue.known(request.model_id, seq_id, digest)) is not None:
            return known
        request = self._checked(request)
        return self._accept(request, request.model_id, seq_id, request.model_id, digest)

    def heartbeat_of(self, model_id: str) -> None:
        session = self.tenants.sessions.get(self.tenants.model(model_id).session_id)
        if session:
            session.last_seen = time.monotonic()

    def _checked(self, request: rq.ModelRequest) -> rq.ModelRequest:
        model = self.tenants.model(request.model_id)
        if isinstance(request, rq.ForwardBackward):
            return replace(request, loss=admission.checked_batch(request, model.spec, self.config, self.able))
        if isinstance(request, rq.OptimStep):
            admission.check_adam(request.adam)
        if isinstance(request, rq.SaveForSampler):
            self.tenants.policy(request.model_id)
        if isinstance(request, rq.LoadWeights):
            parse_path(request.path)
        return request

    def _submit_create(self, request: rq.CreateModel) -> str:
        """The id of the model is the client's (session and number), so a repeat of it is a retry."""
        self.tenants.session(request.session_id)
        model_id = checked_id(request.model_id, "model id")
        digest = admission.digest_of(request)
        if (known := self.queue.known(model_id, 0, digest)) is not None:
            return known
        alive = [model.spec for model in self.tenants.models.values()]
        spec = request.spec
        if request.from_path:
            saved = self._executor.folders.spec(parse_path(request.from_path))
            if request.with_optimizer and parse_path(request.from_path).kind != "weights":
                raise InvalidRequest(f"{request.from_path} has no optimizer state; only tinker://<model id>/weights/<name> does")
            spec = replace(saved, model_id=model_id)
        admission.check_spec(spec, self.config, self.able, alive)
        request = replace(request, spec=spec)
        request_id = self._accept(request, model_id, 0, model_id, digest)
        self.tenants.models[model_id] = Model(spec, request.session_id, request.user_metadata)
        return request_id

    def _submit_sample(self, request: rq.Sample) -> str:
        digest = admission.digest_of(request)
        if (known := self.queue.known(request.sampler_id, request.seq_id, digest)) is not None:
            return known
        sampler = self.tenants.sampler(request.sampler_id)
        if sampler.session_id in self.tenants.sessions:
            self.tenants.sessions[sampler.session_id].last_seen = time.monotonic()
        admission.check_sample(request, self.config, self.able)
        return self._accept(request, request.sampler_id, request.seq_id, None, digest)

    def _accept(
        self, request: rq.Request, stream: str, seq_id: int | None, line: str | None, digest: int = 0, bounded: bool = True
    ) -> str:
        request_id = f"r{uuid.uuid4().hex}"
        self.queue.accept(request_id, stream, seq_id, digest, line, bounded)
        self.results.open(request_id)
        self._requests[request_id] = request
        if line is None:
            assert isinstance(request, rq.Sample)
            sampler = self.tenants.sampler(request.sampler_id)
            sampler.users += 1
            self._spawn(self._run_sample(request_id, request, sampler))
        else:
            self._start_next(line)
        return request_id

    def _start_next(self, line: str) -> None:
        request_id = self.queue.next(line)
        if request_id is not None:
            self._spawn(self._run(request_id, line))

    async def _run(self, request_id: str, line: str) -> None:
        request = self._requests[request_id]
        assert not isinstance(request, rq.Sample)
        try:
            result = await self._executor.run(request)
        except Exception as error:  # noqa: BLE001  the lane's boundary: every fault becomes an answer
            result = self._failure(request_id, error)
        self._answer(request_id, line, result)
        if isinstance(request, rq.Unload):
            self.queue.forget(line)
        self._start_next(line)

    async def _run_sample(self, request_id: str, request: rq.Sample, sampler: Sampler) -> None:
        try:
            async with self._sample_slots:
                result = await self._executor.sample(request_id, request, sampler)
        except Exception as error:  # noqa: BLE001  the lane's boundary
            result = self._failure(request_id, error)
        self._answer(request_id, None, result)
        await self._executor.release(sampler)

    def _answer(self, request_id: str, line: str | None, result: Result) -> None:
        del self._requests[request_id]
        self.queue.finish(request_id, line)
        self.results.resolve(request_id, result)

    def _failure(self, request_id: str, error: Exception) -> Failure:
        if not isinstance(error, UserError):
            log.error("request %s failed: %s", request_id, error, exc_info=not isinstance(error, SkyrlActorsError))
        return Failure.of(error)

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | None:
        return await self.results.wait(request_id, timeout_s)

    async def open_sampler(self, sampler_id: str, session_id: str | None, base_model: str | None, path: str | None) -> Sampler:
        """Idempotent by id. Raises UserError for an unknown base model or path."""
        if sampler_id in self.tenants.samplers:
            return self.tenants.samplers[sampler_id]
        if session_id is not None:
            self.tenants.session(session_id)
        if base_model is None and path is None:
            raise InvalidRequest("name a base_model or a model_path to sample from")
        if base_model is not None and base_model != self.able.base_model:
            raise InvalidRequest(f"unknown base model {base_model!r}; this service has {self.able.base_model!r}")
        return await self._executor.open_sampler(checked_id(sampler_id, "sampler id"), session_id, self.able.base_model, path)

    def checkpoint_spec(self, path: TinkerPath) -> ModelSpec:
        return self._executor.folders.spec(path)

    def fault(self) -> str | None:
        """Why a request would not be served now; None when it would."""
        if self.capabilities is None:
            return "the service is still starting"
        return self.backend.fault()

    async def status(self) -> dict[str, Any]:
        backend = await self.backend.status() if self.capabilities else {}
        return {
            "name": self.config.name,
            "ready": self.capabilities is not None,
            "uptime_s": round(time.time() - self.started_at, 1),
            "sessions": len(self.tenants.sessions),
            "samplers": len(self.tenants.samplers),
            "open_requests": self.queue.num_open,
            "queued": self.queue.lengths(),
            "models": [
                {"model_id": m.spec.model_id, "role": m.spec.role, "lora_rank": m.spec.lora.rank if m.spec.lora else 0,
                 "steps": m.steps, "ready": m.ready}
                for m in self.tenants.models.values()
            ],
            **backend,
        }  # fmt: skip

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.backend.close()

    async def _free_silent_sessions(self) -> None:
        timeout_s = self.config.limits.session_timeout_s
        while True:
            await asyncio.sleep(timeout_s / 10)
            for session_id in self.tenants.silent_sessions(time.monotonic(), timeout_s):
                log.warning("session %s was silent for %.0f s: its models are freed", session_id, timeout_s)
                try:
                    await self.finish_session(session_id)
                except SkyrlActorsError as error:
                    log.error("session %s was not freed: %s", session_id, error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
