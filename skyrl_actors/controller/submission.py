"""Check requests and accept them durably, each once."""

import asyncio
import uuid
from contextlib import ExitStack
from dataclasses import replace

from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.config.shard_configs import refuse_other_shard
from skyrl_actors.controller import admission
from skyrl_actors.controller.examine import Examiner
from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.samples import Samples
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs import verb_of_model
from skyrl_actors.controller.verbs.create_model import check_spec, spec_from
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import Conflict, InvalidRequest
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path
from skyrl_actors.messages.seeds import seeded


class Submission:
    """The way of a request from its arrival until it is in the journal and queued."""

    def __init__(
        self,
        context: VerbContext,
        ledger: Ledger,
        lanes: Lanes,
        samples: Samples,
        examiner: Examiner,
        replayer: Replayer,
    ):
        self._context = context
        self._tenants = context.tenants
        self._ledger = ledger
        self._lanes = lanes
        self._samples = samples
        self._examiner = examiner
        self._replayer = replayer

    async def submit(self, request: rq.Request, request_id: str | None, bases: ServedModels) -> str:
        """Accept a request durably and return its id.

        The same `request_id` again is the same request. Raises UserError or Unavailable; then
        nothing was accepted.
        """
        admission.check_seq_id(getattr(request, "seq_id", None))
        if request_id is not None and self._ledger.knows(request_id):
            return await self._ledger.accepted_before(request_id)
        if isinstance(request, rq.Sample):
            return await self._sample(request, request_id, bases)
        if isinstance(request, rq.CreateModel):
            return await self._create(request, request_id, bases)
        return await self._of_model(request, request_id, bases)

    async def _of_model(
        self, request: rq.ModelRequest, request_id: str | None, bases: ServedModels
    ) -> str:
        model = self._tenants.model(request.model_id)
        self._tenants.session(model.session_id)
        self._tenants.mark_active(model.session_id, self._now())
        base = model.spec.base_model
        request, digest = await self._examiner.examined(
            request, model.spec, self._context.configs.of(base), bases.of(base)
        )
        request = await self._context.routes.with_routes(request, model)  # not in the digest
        model_id, seq_id = request.model_id, getattr(request, "seq_id", None)
        if (known := await self._ledger.known(model_id, seq_id, digest, request_id)) is not None:
            return known
        self._tenants.session(self._tenants.model(model_id).session_id)  # may have ended since
        op = await self._ledger.accept(
            request,
            model_id,
            seq_id,
            model_id,
            model.session_id,
            digest=digest,
            request_id=request_id,
        )
        op.base_model = base
        verb_of_model(request).accepted(request, self._context)
        self._lanes.start_next(model_id)
        return op.request_id

    async def _create(
        self, request: rq.CreateModel, request_id: str | None, bases: ServedModels
    ) -> str:
        """Accept a create. The client chooses the model id, so the same id again is a retry."""
        self._tenants.session(request.session_id)
        # A checkpoint's own base model is known only after the checkpoint was read.
        base = "" if request.from_path else request.spec.base_model
        request, digest = await self._examiner.examined(
            request, None, self._context.configs.of(base), bases.of(base)
        )
        model_id = request.model_id
        if await self._ledger.journal.was_unloaded(model_id):
            raise Conflict(
                f"model {model_id} was unloaded, and its id is not used again; "
                "create a model with another model_seq_id"
            )
        if (known := await self._ledger.known(model_id, 0, digest, request_id)) is not None:
            return known
        if request.from_path:
            saved = await self._saved_spec(request.from_path, request.with_optimizer)
            request = replace(request, spec=spec_from(request, saved))
            # The same request may have arrived, or the session may have ended, during the read.
            if (known := await self._ledger.known(model_id, 0, digest, request_id)) is not None:
                return known
            self._tenants.session(request.session_id)
        base = request.spec.base_model  # that of the checkpoint, if it starts from one
        check_spec(request.spec, self._context.configs.of(base), bases.of(base))
        self._context.capacity.check_key(model_id)
        self._tenants.models[model_id] = Model(
            spec=request.spec, session_id=request.session_id, user_metadata=request.user_metadata
        )
        with ExitStack() as undo:
            undo.callback(self._tenants.models.pop, model_id, None)
            op = await self._ledger.accept(
                request,
                model_id,
                0,
                model_id,
                request.session_id,
                digest=digest,
                request_id=request_id,
            )
            undo.pop_all()
        self._replayer.progress[model_id] = Progress(position=op.number)
        self._lanes.start_next(model_id)
        return op.request_id

    async def _saved_spec(self, path: str, with_optimizer: bool) -> ModelSpec:
        where = parse_path(path)
        if with_optimizer and where.kind == "sampler_weights":
            raise InvalidRequest(
                f"{path} has no optimizer state; only tinker://<model id>/weights/<name> does"
            )
        return await self.checkpoint_spec(where)

    async def checkpoint_spec(self, path: TinkerPath) -> ModelSpec:
        """Return the model that a checkpoint or a past step belongs to."""
        if path.kind == "steps":
            refuse_other_shard(path, self._context.config)
            return await self._replayer.spec_of_step(path)
        return await self._context.disk.read(self._context.folders.spec, path)

    async def _sample(self, request: rq.Sample, request_id: str | None, bases: ServedModels) -> str:
        known_sampler = self._tenants.samplers.get(request.sampler_id)
        base = known_sampler.base_model if known_sampler else ""
        request, digest = await self._examiner.examined(
            request, None, self._context.configs.of(base), bases.of(base)
        )
        sampler_id, seq_id = request.sampler_id, request.seq_id
        if (known := await self._ledger.known(sampler_id, seq_id, digest, request_id)) is not None:
            return known
        sampler = self._tenants.sampler(sampler_id)
        self._tenants.mark_active(sampler.session_id, self._now())
        request_id = request_id or f"r{uuid.uuid4().hex}"
        request = seeded(request, request_id)
        sampler.users += 1  # keeps the sampler's files while the journal writes the request
        try:
            op = await self._ledger.accept(
                request,
                sampler_id,
                seq_id,
                None,
                sampler.session_id,
                digest=digest,
                request_id=request_id,
            )
            self._samples.start(op, sampler)
        finally:
            await self._samples.release(sampler)
        return op.request_id

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
