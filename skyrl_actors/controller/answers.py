"""Serve the calls that wait for the answers of accepted requests."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from skyrl_actors.controller.calls import AnswerCalls
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.operations import Op
from skyrl_actors.controller.readiness import Readiness
from skyrl_actors.controller.replies import Replies
from skyrl_actors.controller.service_mode import PAUSED
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.results import Completion, PartialSample, Ready, Result, Waiting
from skyrl_actors.transport.protocols import Deferred


class Answers:
    """The answers of one controller's requests; it serves `AnswerCalls`.

    A poll for an answer counts as a sign of life of the request's session.
    """

    def __init__(self, context: VerbContext, ledger: Ledger, readiness: Readiness):
        self._backend = context.backend
        self._tenants = context.tenants
        self._capacity = context.capacity
        self._mode = context.admin.mode
        self._ledger = ledger
        self._results = ledger.results
        self._readiness = readiness
        self._replies = Replies(ledger.results, ledger.journal)

    async def retrieve(self, request_id: str, timeout_s: float) -> Result | Ready | Waiting:
        """Return a small answer, the size of a large one, or why there is none after `timeout_s`.

        Raises NotFound for an id that is unknown or was swept.
        """
        is_ready = await self._is_ready(request_id, timeout_s)
        return await self._replies.ready(request_id) if is_ready else self.waiting(request_id)

    async def fetch(self, request_id: str, num_bytes: int) -> Deferred[Result]:
        """Return a large answer. `num_bytes` is the size that `retrieve` returned."""

        async def load() -> Result:
            found = await self.whole(request_id, 0)
            if found is None:
                raise InternalError(f"request {request_id} is not answered yet")
            return found

        return Deferred(num_bytes=num_bytes, load=load)

    async def whole(self, request_id: str, timeout_s: float) -> Result | None:
        """Return an answer of any size, or None when it is not ready in time.

        Raises NotFound for an id that is unknown or was swept.
        """
        is_ready = await self._is_ready(request_id, timeout_s)
        return await self._replies.whole(request_id) if is_ready else None

    async def _is_ready(self, request_id: str, timeout_s: float) -> bool:
        if request_id not in self._results:
            self._readiness.check_started()
            return True
        with self._polled(request_id):
            return await self._results.wait(request_id, timeout_s) is not None

    def _polled(self, request_id: str) -> AbstractContextManager[None]:
        """Return a context in which the session of this request is polled by its client."""
        op = self._ledger.ops.get(request_id)
        holder = op and (
            self._tenants.models.get(op.model_id or "") or self._tenants.samplers.get(op.stream)
        )
        if not holder:
            return nullcontext()
        return self._tenants.polled(holder.session_id, asyncio.get_running_loop().time)

    async def partial(
        self, request_id: str, have: int, timeout_s: float
    ) -> PartialSample | Result | Ready:
        """Return the tokens of a streamed sample after the first `have`, or its answer if ready."""
        if request_id not in self._results:
            self._readiness.check_started()
            return await self._replies.ready(request_id)
        answer = asyncio.ensure_future(self._results.wait(request_id, timeout_s))
        growing = asyncio.ensure_future(self._backend.partial(request_id, have, timeout_s))
        try:
            with self._polled(request_id):
                await asyncio.wait([answer, growing], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                part = growing.result()
                if (op := self._ledger.ops.get(request_id)) is not None:
                    op.streamed = max(op.streamed, have + len(part.tokens))
                return part
            if not answer.result():  # nothing came in time; the sample may have begun meanwhile
                return PartialSample()
            self._backend.end_stream(request_id)
            return await self._replies.ready(request_id)
        finally:
            answer.cancel()
            growing.cancel()

    async def completed(
        self, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Completion], int]:
        """Return answered samples of a client copy after `cursor`, and the next cursor."""
        self._readiness.check_started()
        sampler = self._tenants.sampler(sampler_id)
        await self._ledger.recall.stream(sampler_id)
        with self._tenants.polled(sampler.session_id, asyncio.get_running_loop().time):
            return await self._ledger.completions.after(sampler_id, clone, cursor, timeout_s)

    def waiting(self, request_id: str = "") -> Waiting:
        """Return the reason why an answer is not ready."""
        if (no_room := self._capacity.reason(request_id)) is not None:
            return Waiting("paused_capacity", no_room)
        if self._mode.is_paused:
            return Waiting("paused_capacity", PAUSED)
        op = self._ledger.ops.get(request_id)
        if op is not None and (elsewhere := self._backend.waiting(self._base_of(op))) is not None:
            return Waiting("paused_capacity", elsewhere)
        state = self._readiness.pause()
        return Waiting() if state is None else Waiting.paused(state)

    def _base_of(self, op: Op) -> str:
        model = self._tenants.models.get(op.model_id or "")
        sampler = self._tenants.samplers.get(op.stream)
        if model is not None:
            return model.spec.base_model
        return op.base_model or (sampler.base_model if sampler else "")


if TYPE_CHECKING:
    _: type[AnswerCalls] = Answers
