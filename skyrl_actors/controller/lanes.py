"""Run the accepted operations of each model in order.

A lane holds its model's lock from the first attempt until the journal has the outcome. When the
ranks die during an operation, the model is restored and the operation runs again. The client sees
a longer wait.
"""

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, nullcontext

from skyrl_actors.backends.backend import BackendCopy
from skyrl_actors.controller.ledger import FIRST_PAUSE_S, LONGEST_PAUSE_S, Ledger
from skyrl_actors.controller.operations import PASSED_ON, Op, Outcome, failed
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.recording import record_metrics, record_span
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.samples import Samples
from skyrl_actors.controller.tasks import Tasks
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs import model_verb, verb_of_model
from skyrl_actors.controller.verbs.verb import AnsweredOp, ModelTables, VerbContext
from skyrl_actors.journal.entries import SamplerOpened
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import (
    InternalError,
    PartDown,
    SkyrlActorsError,
    StateLost,
    Unavailable,
    UserError,
)
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.results import Failure
from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.log import named
from skyrl_actors.observe.spans import SPANS

log = logging.getLogger(__name__)
FAULTY_ATTEMPTS = 2  # attempts of an operation that raises in ranks that stay alive


class Lanes:
    """Run the operations of all models as asyncio tasks."""

    def __init__(
        self,
        ledger: Ledger,
        context: VerbContext,
        replayer: Replayer,
        samples: Samples,
        tasks: Tasks,
    ):
        self.ledger = ledger
        self.queue = ledger.queue
        self.tenants = context.tenants
        self.context = context
        self.replayer = replayer
        self.samples = samples
        self.tasks = tasks
        self.tables = ModelTables(context.tenants, replayer.progress)
        self.config = context.config
        self.capacity = context.capacity
        context.admin.mode.watch(lambda is_paused: None if is_paused else self.start_all())
        COUNTS.watch("open_requests", lambda: self.queue.num_open)
        COUNTS.watch("recoveries", lambda: replayer.recoveries)

    def cancel(self, op: Op, why: str) -> None:
        """Let a request that does not run yet fail when it is the next of its model."""
        op.cancelled = why
        assert op.model_id is not None
        if op.kind is not None and model_verb(op.kind).creates_model:
            self.capacity.withdraw(op.model_id, why)
        self.start_next(op.model_id)

    def start_all(self) -> None:
        """Start the next request of every model."""
        for model_id in self.queue.lengths():
            self.start_next(model_id)

    def start_next(self, model_id: str) -> None:
        """Start the model's next request, if none runs, one is confirmed and nothing is paused."""
        head = self.queue.head(model_id)
        if self.context.admin.mode.is_paused and head and not self._ends(self.ledger.ops[head]):
            return
        request_id = self.queue.next(model_id)
        if request_id is not None:
            self.tasks.spawn(self._run(self.ledger.ops[request_id], model_id))

    def _ends(self, op: Op) -> bool:
        """Return whether a request only ends something, which a pause does not delay.

        Requests before the unload of an ended session belong to its end.
        """
        ends_model = op.kind is not None and model_verb(op.kind).ends_model
        is_over = op.session_id is not None and op.session_id not in self.tenants.sessions
        return ends_model or is_over or op.cancelled is not None

    async def _run(self, op: Op, model_id: str) -> None:
        named(op.request_id, model_id)
        if (own := self.tenants.models.get(model_id)) is not None:
            op.base_model = own.spec.base_model
        progress = self.replayer.progress.setdefault(model_id, Progress(position=op.number))
        # Before the lock: a sample that holds memory may wait for the lock to replay lost weights.
        await self.ledger.memory.start(op)
        is_resumed = op.header is not None
        if is_resumed and op.kind is not None and model_verb(op.kind).can_read_files:
            progress.suspect = True  # the files may have changed since the ranks read them
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
            request = await self.ledger.request_of(op)
            if op.cancelled:
                raise UserError(op.cancelled)
            if await verb_of_model(request).prepare(op, request, self.context):
                op.begun = time.monotonic()
            return await self._attempts(op, request, progress)
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  every fault becomes an answer
            progress.suspect = True
            if op.request is not None:
                await verb_of_model(op.request).undo(op.request, self.context)
            return failed(op, error)

    async def _attempts(self, op: Op, request: rq.Request, progress: Progress) -> Outcome:
        """Run an operation until it succeeds or its attempts are used up.

        Raises the last error; then nothing of the operation was applied.
        """
        verb, attempts, faults, is_down = verb_of_model(request), 0, 0, False
        while True:
            try:
                is_first = not (attempts or faults or progress.suspect)
                # A restored model could lose its state again before the operation runs, and one
                # that is filled from files before its state was copied.
                rests = is_first or verb.needs != "state"
                copy: BackendCopy | None = None
                fills = verb.reads_files(request)
                if fills and progress.writing is not None:  # one copy at a time is in host memory
                    await asyncio.wait([progress.writing])
                async with self._holding(op, rests and not fills):
                    if not is_first:
                        await self._bring_back(op, request, progress, is_down)
                    op.after = progress.position
                    outcome = await verb.execute(op, request, self.context)
                    if fills:
                        copy = await self.replayer.copied(self._spec_of(op), op.number)
                if fills:
                    await self._snapshot_loaded(op, copy)
                return outcome
            except PartDown as error:  # nothing was begun, so this is not an attempt
                progress.suspect = is_down = True
                log.warning("operation %d waits: %s", op.number, error)
                await asyncio.sleep(FIRST_PAUSE_S)  # whatever the verb waits for: never in a circle
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

    def _holding(self, op: Op, not_needed: bool) -> AbstractAsyncContextManager[None]:
        return nullcontext() if not_needed else self.context.backend.holding(op.base_model)

    async def _snapshot_loaded(self, op: Op, copy: BackendCopy | None) -> None:
        """Write a snapshot of loaded state before the answer.

        A replay cannot load the checkpoint again, because it may be overwritten later.
        """
        spec = self._spec_of(op)
        while True:
            try:
                if copy is None:
                    copy = await self.replayer.copied(spec, op.number)
                await self.replayer.write_copy(spec, op.number, copy)
                return
            except Unavailable as error:
                log.warning("operation %d waits for its snapshot: %s", op.number, error)
                copy = None  # the ranks have freed it
                await asyncio.sleep(LONGEST_PAUSE_S)

    def _spec_of(self, op: Op) -> ModelSpec:
        assert op.model_id is not None
        return self.tenants.models[op.model_id].spec

    async def _bring_back(
        self, op: Op, request: rq.Request, progress: Progress, is_down: bool
    ) -> None:
        """Restore the model unless the ranks hold its state as the journal records it.

        `is_down`: the ranks were restarting, so a verb that needs nothing waits for them too.
        """
        model = self.tenants.models.get(op.model_id or "")
        needs = verb_of_model(request).needs
        waits = needs == "ranks" or (needs == "nothing" and is_down)
        if waits and model is not None:
            await self.replayer.backend.ready(model.spec)
        elif needs == "state" and model is not None and model.ready:
            resident = (await self.replayer.backend.residents()).get(model.spec.model_id)
            # They differ when an operation was applied and failed afterwards.
            if resident != progress.position:
                await self.replayer.restore(model)
        progress.suspect = False

    def _record_metrics(self, op: Op, outcome: Outcome) -> None:
        model = self.tenants.models.get(op.model_id or "")
        role = "policy" if model is None else model.spec.role
        record_metrics(COUNTS, op, outcome, role, self.context.admin.keys.label)

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
                await self.samples.add_sampler(entry)
        if (
            model is None
            or outcome.effect == "none"
            or model.spec.model_id not in self.tenants.models
        ):
            return
        await self.replayer.snapshot_if_due(model)

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
