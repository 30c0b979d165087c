"""Free what an ended session held: queued requests, samples, models and samplers."""

import asyncio
from dataclasses import replace

from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import LONGEST_PAUSE_S, Ledger
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.samples import Samples
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.results import Failure


class SessionEnd:
    """The end of a session. Every step may be repeated."""

    def __init__(self, context: VerbContext, ledger: Ledger, lanes: Lanes, samples: Samples):
        self._context = context
        self._ledger = ledger
        self._lanes = lanes
        self._samples = samples

    async def free(self, session_id: str) -> None:
        """Fail the session's queued requests, and free its models and samplers."""
        tenants, queue, results = self._context.tenants, self._ledger.queue, self._ledger.results
        # At once: an ended session is no longer silent, and its waiting samples would run.
        self._samples.end_queued_of(session_id)
        text = f"session {session_id} was finished before this ran"
        unloads: list[str] = []
        models = [model.spec.model_id for model in tenants.models_of(session_id)]
        for model_id in models:
            for request_id in queue.drain(model_id):
                op = self._ledger.ops[request_id]
                # The request has left its model's queue, so its answer must not release the lane.
                await self._ledger.answer(
                    replace(op, model_id=None), Outcome(Failure(text, "user"))
                )
            self._context.capacity.withdraw(
                model_id, f"session {session_id} was finished before this ran"
            )
        # First: weights that accepted samples still need are written before the models are deleted.
        await self._samples.retire_all_of(session_id)
        for model_id in models:
            op = await self._accepted_unload(model_id, session_id)
            self._lanes.start_next(model_id)
            unloads.append(op.request_id)
        for request_id in unloads:
            if request_id in results:  # otherwise its answer has left memory already
                await results.wait(request_id, self._context.config.restart.call_timeout_s)
        # Again: a save that ran when the session ended has added a sampler since.
        await self._samples.retire_all_of(session_id)
        tenants.forget_expired(session_id)

    async def _accepted_unload(self, model_id: str, session_id: str) -> Op:
        """Accept an unload, and retry without end: the session has ended, so no client retries."""
        while True:
            try:
                return await self._ledger.accept(
                    rq.Unload(model_id), model_id, None, model_id, session_id, bounded=False
                )
            except Unavailable:
                await asyncio.sleep(LONGEST_PAUSE_S)
