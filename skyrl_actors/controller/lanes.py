"""Run accepted requests: those of one model in order, samples concurrently.

A lane holds its model's lock from the first attempt until the journal has the outcome. When the
ranks die during an operation, the model is restored and the operation runs again. The client sees
a longer wait.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.ledger import LONGEST_PAUSE_S, Ledger, Op, Outcome
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.recording import record_metrics, record_span
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.slots import FairSlots
from skyrl_actors.controller.tenants import Model, Sampler, TenantTable
from skyrl_actors.controller.verbs import SAMPLE, model_verb, verb_of_model
from skyrl_actors.controller.verbs.verb import AnsweredOp, ModelTables, VerbContext
from skyrl_actors.journal.entries import SamplerOpened, SamplerRetired
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import (
    InternalError,
    PartDown,
    SkyrlActorsError,
    StateLost,
    Unavailable,
    UserError,
    WeightsGone,
)
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.results import Failure, Result, SampleOutput
from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.log import named
from skyrl_actors.observe.spans import SPANS

log = logging.getLogger(__name__)
LORA_SAMPLER_VERSIONS = 256  # unnamed samplers that are kept for a LoRA model
FAULTY_ATTEMPTS = 2  # attempts of an operation that raises in ranks that stay alive


class Lanes:
    """Run the operations of all models and samplers as asyncio tasks."""

    def __init__(
        self,
        ledger: Ledger,
        tenants: TenantTable,
        context: VerbContext,
        replayer: Replayer,
        completions: Completions,
    ):
        self.ledger = ledger
        self.queue = ledger.queue
        self.tenants = tenants
        self.context = context
        self.replayer = replayer
        self.tables = ModelTables(tenants, replayer.progress)
        self.config = context.config
        self._tasks: set[asyncio.Task[None]] = set()
        self.completions = completions
        self.capacity = context.capacity
        self._sample_slots = FairSlots(self.config.limits.samples_in_flight)
        self._sampling: dict[str, asyncio.Task[None]] = {}
        # By version: retired samplers that still have unanswered samples.
        self._leaving: Counter[str] = Counter()
        self._cancelled: set[str] = set()
        COUNTS.watch("open_requests", lambda: self.queue.num_open)
        COUNTS.watch("recoveries", lambda: len(replayer.recovery_s))

    def start_next(self, model_id: str) -> None:
        """Start the model's next request, if none runs and one is confirmed."""
        request_id = self.queue.next(model_id)
        if request_id is not None:
            self.spawn(self._run(self.ledger.ops[request_id], model_id))

    def start_sample(self, op: Op, sampler: Sampler) -> None:
        """Start a sample. It counts as a user of its sampler until it is answered."""
        sampler.users += 1
        self._sampling[op.request_id] = self.spawn(self._run_sample(op, sampler))

    def cancel_sample(self, request_id: str) -> None:
        task = self._sampling.get(request_id)
        if task is not None:
            self._cancelled.add(request_id)
            task.cancel()

    async def _run(self, op: Op, model_id: str) -> None:
        named(op.request_id, model_id)
        progress = self.replayer.progress.setdefault(model_id, Progress(position=op.number))
        # Before the lock: a sample that holds memory may wait for the lock to replay lost weights.
        await self.ledger.memory.start(op)
        async with progress.lock:
            op.begun = time.monotonic()
            outcome = await self._outcome(op, progress)
            model = self.tenants.models.get(model_id)
            self._record_metrics(op, outcome)
            if model is not None:
                self._fold(op, outcome, model)
            await self.ledger.answer(op, outcome, progress.step)
            record_span(SPANS, op, outcome, time.monotonic())
            await self._after(op, outcome, model)
        if op.kind is not None and model_verb(op.kind).ends_model:
            self.queue.forget(model_id)
            self.replayer.progress.pop(model_id, None)
        if model_id not in self.tenants.models:
            self.capacity.give_back(model_id)
        self.start_next(model_id)

    async def _outcome(self, op: Op, progress: Progress) -> Outcome:
        try:
            request = await self._request(op)
            if await verb_of_model(request).prepare(op, request, self.context):
                op.begun = time.monotonic()
            return await self._attempts(op, request, progress)
        except Exception as error:  # noqa: BLE001  every fault becomes an answer
            progress.suspect = True
            if op.request is not None:
                await verb_of_model(op.request).undo(op.request, self.context)
            return self._failed(op, error)

    async def _request(self, op: Op) -> rq.Request:
        """Return the operation's request. Retry while the journal cannot be read."""
        while True:
            try:
                return await self.ledger.request_of(op)
            except Unavailable as error:
                log.warning("operation %d waits for the journal: %s", op.number, error)
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _attempts(self, op: Op, request: rq.Request, progress: Progress) -> Outcome:
        """Run an operation until it succeeds or its attempts are used up.

        Raises the last error; then nothing of the operation was applied.
        """
        verb, attempts, faults = verb_of_model(request), 0, 0
        while True:
            try:
                if attempts or faults or progress.suspect:
                    await self._bring_back(op, request, progress)
                op.after = progress.position
                outcome = await verb.execute(op, request, self.context)
                if verb.reads_files(request):
                    await self._snapshot_loaded(op, progress)
                return outcome
            except PartDown as error:  # nothing was begun, so this is not an attempt
                progress.suspect = True
                log.warning("operation %d waits: %s", op.number, error)
            except StateLost as error:
                attempts += 1
                log.warning("operation %d (%s): %s", op.number, type(request).__name__, error)
                if attempts >= self.config.restart.attempts:
                    raise
            except UserError:
                raise
            except Unavailable as error:
                log.warning("operation %d waits: %s", op.number, error)
                await asyncio.sleep(LONGEST_PAUSE_S)
            except InternalError as error:
                faults += 1
                log.warning(
                    "operation %d (%s) failed: %s", op.number, type(request).__name__, error
                )
                if faults >= FAULTY_ATTEMPTS or not verb.is_repeatable:
                    raise

    async def _snapshot_loaded(self, op: Op, progress: Progress) -> None:
        """Write a snapshot of loaded state before the answer.

        A replay cannot load the checkpoint again, because it may be overwritten later.
        """
        assert op.model_id is not None
        model, before = self.tenants.models[op.model_id], progress.position
        while True:
            progress.position = op.number
            try:
                await self.replayer.snapshot_now(model)
                return
            except Unavailable as error:
                log.warning("operation %d waits for its snapshot: %s", op.number, error)
                await asyncio.sleep(LONGEST_PAUSE_S)
            finally:
                progress.position = before

    async def _bring_back(self, op: Op, request: rq.Request, progress: Progress) -> None:
        """Restore the model unless the ranks hold its state as the journal records it."""
        model = self.tenants.models.get(op.model_id or "")
        needs = verb_of_model(request).needs
        if needs == "ranks" and model is not None:
            await self.replayer.backend.ready(model.spec.role)
        elif needs == "state" and model is not None and model.ready:
            resident = (await self.replayer.backend.residents()).get(model.spec.model_id)
            # They differ when an operation was applied and failed afterwards.
            if resident != progress.position:
                await self.replayer.restore(model)
        progress.suspect = False

    def _record_metrics(self, op: Op, outcome: Outcome) -> None:
        record_metrics(
            COUNTS,
            op,
            outcome,
            {name: model.spec.role for name, model in self.tenants.models.items()},
        )

    def _fold(self, op: Op, outcome: Outcome, model: Model) -> None:
        """Record an outcome in the tables of models, before the answer is visible."""
        result = outcome.result
        answered = AnsweredOp(
            number=op.number,
            effect=outcome.effect,
            failed=isinstance(result, Failure),
            num_bytes=op.num_bytes,
            request=op.request,
            failure=result.message if isinstance(result, Failure) else None,
        )
        now = asyncio.get_running_loop().time()
        if op.kind is not None:
            model_verb(op.kind).fold(model, answered, self.tables, now)

    async def _after(self, op: Op, outcome: Outcome, model: Model | None) -> None:
        for entry in outcome.entries:
            if isinstance(entry, SamplerOpened):
                await self.add_sampler(entry)
        if (
            model is None
            or outcome.effect == "none"
            or model.spec.model_id not in self.tenants.models
        ):
            return
        await self.replayer.snapshot_if_due(model)

    async def add_sampler(self, entry: SamplerOpened) -> None:
        """Add a sampler, and retire the oldest ones of its model beyond the configured number."""
        sampler = Sampler(
            sampler_id=entry.sampler_id,
            base_model=entry.base_model,
            model_path=entry.model_path,
            weights=entry.weights,
            session_id=entry.session_id,
            owner=entry.owner,
            number=entry.number,
        )
        full = self.config.limits.full_sampler_versions
        keep = LORA_SAMPLER_VERSIONS if entry.weights.adapter else full
        for old in self.tenants.add_sampler(sampler, keep):
            await self.retire(old)

    async def _run_sample(self, op: Op, sampler: Sampler) -> None:
        named(op.request_id, sampler.sampler_id)
        try:
            tenant = owner_of(op.request_id) or sampler.session_id or sampler.sampler_id
            async with self._sample_slots.hold(tenant, *op.cost) as place:
                request = await self._request(op)
                assert isinstance(request, rq.Sample)
                op.begun = time.monotonic()
                outcome = await self._sampled(op, request, sampler)
                place.tokens = tokens_taken(request, outcome.result)
        except asyncio.CancelledError:
            if op.request_id not in self._cancelled:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            outcome = Outcome(Failure("cancelled by its client", "user", "Cancelled"))
        except Exception as error:  # noqa: BLE001  every fault becomes an answer
            outcome = self._failed(op, error)
        if isinstance(outcome.result, SampleOutput):
            log.debug(
                "sample %s of %s was answered by weights %s",
                op.request_id,
                sampler.sampler_id,
                outcome.result.version,
            )
        del self._sampling[op.request_id]  # from here on it can no longer be cancelled
        self._cancelled.discard(op.request_id)
        self._record_metrics(op, outcome)
        await self.ledger.answer(op, outcome)
        record_span(SPANS, op, outcome, time.monotonic())
        self.completions.note(
            op.stream, op.seq_id, op.request_id, isinstance(outcome.result, Failure)
        )
        await self.release(sampler)

    async def release(self, sampler: Sampler) -> None:
        """Count one user less; free a retired sampler without users."""
        sampler.users -= 1
        sampler.last_used = asyncio.get_running_loop().time()
        if sampler.retired and not sampler.users:
            self._leaving[sampler.weights.version] -= 1
            await self._free(sampler)

    async def _sampled(self, op: Op, request: rq.Sample, sampler: Sampler) -> Outcome:
        """Compute a sample. Rebuild its weights when they were lost with a machine's memory."""
        for _ in range(self.config.restart.attempts):
            try:
                return await self._computed(op, request, sampler)
            except InternalError as error:
                # WeightsGone without missing weights: another sample has rebuilt them since.
                if not await self._rebuilt_weights(sampler) and not isinstance(error, WeightsGone):
                    raise
                log.warning(
                    "sample %s is run again with weights that were lost: %s", op.request_id, error
                )
        return await self._computed(op, request, sampler)

    async def _computed(self, op: Op, request: rq.Sample, sampler: Sampler) -> Outcome:
        """Compute a sample. Retry while the checkpoint folder cannot be read."""
        while True:
            try:
                return await SAMPLE.execute(op.request_id, request, sampler, self.context)
            except Unavailable as error:
                log.warning("sample %s waits: %s", op.request_id, error)
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _rebuilt_weights(self, sampler: Sampler) -> bool:
        """Rebuild a sampler's lost weights from its model. Return False when none were missing."""
        model = self.tenants.models.get(sampler.owner or "")
        backend = self.replayer.backend
        try:
            if model is None or await backend.has_sampler(sampler.weights):
                return False
        except StateLost:
            return True
        async with self.replayer.progress[model.spec.model_id].lock:
            if not await backend.has_sampler(sampler.weights):
                await self.replayer.restore(model, (sampler.weights.version,))
        return True

    async def retire_samplers_of(self, session_id: str) -> None:
        for sampler in self.tenants.samplers_of(session_id):
            self.queue.forget(sampler.sampler_id)
            await self.retire(sampler)

    async def retire(self, sampler: Sampler) -> None:
        """Refuse new samples; free the weights when the last accepted sample is answered."""
        self.tenants.remove_sampler(sampler.sampler_id)
        sampler.retired = True
        if sampler.users:
            self._leaving[sampler.weights.version] += 1
        else:
            await self._free(sampler)

    async def _free(self, sampler: Sampler) -> None:
        await self.ledger.write_until_stored(SamplerRetired(sampler.sampler_id))
        self.queue.forget(sampler.sampler_id)
        self.completions.forget(sampler.sampler_id)
        # Weights of named checkpoints have no parts: their files stay.
        if sampler.weights.parts and not self._is_shared(sampler.weights.version):
            try:
                await self.context.backend.drop_sampler(sampler.weights)
            except InternalError as error:
                log.warning("files of sampler %s were not freed: %s", sampler.sampler_id, error)

    def _is_shared(self, version: str) -> bool:
        """Return whether another sampler has these weights, as samplers of one checkpoint do."""
        return self._leaving[version] > 0 or any(
            s.weights.version == version for s in self.tenants.samplers.values()
        )

    async def bring_back(self, model: Model, resident: int | None) -> None:
        """Restore a model after a restart of controller or ranks, unless its state is resident.

        `resident` is the position that the ranks hold, -1 for none, None to ask them.
        """
        model_id = model.spec.model_id
        progress = self.replayer.progress[model_id]
        async with progress.lock:
            head = self.queue.head(model_id)
            # The rank may have applied the next operation before the earlier controller
            # recorded its answer.
            expected = {
                progress.position,
                self.ledger.ops[head].number if head else progress.position,
            }
            try:
                if resident is None:
                    resident = (await self.replayer.backend.residents()).get(model_id)
                if model_id in self.tenants.models and resident not in expected:
                    await self.replayer.restore(model)
            except SkyrlActorsError as error:
                log.error(
                    "model %s was not restored: %s; its next operation tries again",
                    model_id,
                    error,
                )
        self.start_next(model_id)

    def _failed(self, op: Op, error: Exception) -> Outcome:
        if not isinstance(error, UserError):
            log.error(
                "request %s failed: %s",
                op.request_id,
                error,
                exc_info=not isinstance(error, SkyrlActorsError),
            )
        return Outcome(Failure.of(error))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task that `close` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def tokens_taken(request: rq.Sample, result: Result) -> int:
    """Return the number of tokens of a sample's prompt and results."""
    sampled = (
        sum(len(one.tokens) for one in result.sequences) if isinstance(result, SampleOutput) else 0
    )
    return len(request.prompt) + sampled
