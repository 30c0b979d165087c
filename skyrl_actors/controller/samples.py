"""Run samples concurrently, and free a sampler's weights after its last sample."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from skyrl_actors.controller.housekeeping import attempt
from skyrl_actors.controller.ledger import FIRST_PAUSE_S, LONGEST_PAUSE_S, Ledger
from skyrl_actors.controller.operations import PASSED_ON, Op, Outcome, failed
from skyrl_actors.controller.presence import FellSilent, Presence
from skyrl_actors.controller.recording import record_metrics, record_span
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.tasks import Tasks
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.controller.verbs import SAMPLE
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.fair_slots import FairSlots
from skyrl_actors.journal.entries import SamplerOpened, SamplerRetired
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import (
    InternalError,
    PartDown,
    StateLost,
    Unavailable,
    WeightsGone,
)
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.results import CANCELLED_KIND, Failure, Result, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights
from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.log import named
from skyrl_actors.observe.spans import SPANS

log = logging.getLogger(__name__)
LORA_SAMPLER_VERSIONS = 256  # unnamed samplers that are kept for a LoRA model


class Samples:
    """The samplers of the service and their running samples."""

    def __init__(
        self,
        ledger: Ledger,
        context: VerbContext,
        replayer: Replayer,
        tasks: Tasks,
    ):
        self.ledger = ledger
        self.queue = ledger.queue
        self.tenants = context.tenants
        self.context = context
        self.config = context.config
        self.replayer = replayer
        self.completions = ledger.completions
        self.tasks = tasks
        # Those of one base model do not wait for those of another, which may be parked.
        self._slots = {
            name: FairSlots(context.configs.of(name).engine_places) for name in context.configs
        }
        for slots in self._slots.values():
            context.admin.mode.watch(slots.pause)
        self._sampling: dict[str, asyncio.Task[None]] = {}
        self._begun: set[str] = set()
        self._cancelled: dict[str, Failure] = {}  # by request id: its answer
        self.presence = Presence(self.tenants, lambda: context.admin.mode.mode == "draining")

    def start(self, op: Op, sampler: Sampler) -> None:
        """Start a sample. It counts as a user of its sampler until it is answered."""
        sampler.users += 1
        op.base_model = sampler.base_model
        self._sampling[op.request_id] = self.tasks.spawn(self._run(op, sampler))

    def cancel(self, request_id: str, why: str) -> bool:
        """Let a sample fail that is not answered yet. Return whether there was such a sample."""
        return self._fail(request_id, Failure(why, "user", CANCELLED_KIND))

    def _fail(self, request_id: str, failure: Failure) -> bool:
        task = self._sampling.get(request_id)
        if task is None:
            return False
        op = self.ledger.ops.get(request_id)
        if op is not None and not self._runs(op):
            op.begun = None  # it has used nothing
        self._cancelled[request_id] = failure
        if request_id in self._begun:  # a task that is cancelled before would never run, nor answer
            task.cancel()
        return True

    def end_queued_of(self, session_id: str) -> None:
        """Let the samples of an ended session fail that do not run."""
        failure = Failure(f"session {session_id} was finished before this ran", "user")
        for request_id in list(self._sampling):
            op = self.ledger.ops.get(request_id)
            if op is not None and op.session_id == session_id and not self._runs(op):
                self._fail(request_id, failure)

    def _runs(self, op: Op) -> bool:
        """Return whether a sample has got its turn and its base model."""
        return op.begun is not None and not self.waits_for_base(op)

    def waits_for_base(self, op: Op) -> bool:
        """Return whether this is a sample whose base model waits for the devices."""
        if op.request_id not in self._sampling:
            return False
        return self.context.backend.waiting(op.base_model, op.request_id) is not None

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
            await self._free(old)

    async def _run(self, op: Op, sampler: Sampler) -> None:
        named(op.request_id, sampler.sampler_id)
        self._begun.add(op.request_id)
        try:
            if op.request_id in self._cancelled:
                raise asyncio.CancelledError
            outcome = await self._outcome(op, sampler)
        except asyncio.CancelledError:
            if op.request_id not in self._cancelled:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
            outcome = Outcome(self._cancelled[op.request_id])
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  every fault becomes an answer
            outcome = failed(op, error)
        if isinstance(outcome.result, SampleOutput):
            log.debug(
                "sample %s of %s was answered by weights %s",
                op.request_id,
                sampler.sampler_id,
                outcome.result.version,
            )
        del self._sampling[op.request_id]  # from here on it can no longer be cancelled
        self._begun.discard(op.request_id)
        self._cancelled.pop(op.request_id, None)
        record_metrics(COUNTS, op, outcome, "", self.context.admin.keys.label)
        await self.ledger.answer(op, outcome)
        record_span(SPANS, op, outcome, time.monotonic())
        self.completions.note(
            op.stream, op.seq_id, op.request_id, isinstance(outcome.result, Failure)
        )
        await self.release(sampler)

    async def _outcome(self, op: Op, sampler: Sampler) -> Outcome:
        """Compute a sample in its turn, while its session's client is there."""
        tenant = owner_of(op.request_id) or sampler.session_id or sampler.sampler_id
        weight = self.context.admin.quotas.weight(owner_of(op.request_id))
        slots = self._slots.get(sampler.base_model) or next(iter(self._slots.values()))
        while True:
            await self.presence.heard(op.session_id)
            try:
                async with (
                    self.presence.present(op.session_id),
                    slots.hold(tenant, *op.cost, weight) as place,
                ):
                    request = await self.ledger.request_of(op)
                    assert isinstance(request, rq.Sample)
                    op.begun = time.monotonic()
                    outcome = await self._sampled(op, request, sampler)
                    kept = self.context.routes.sampled(request, outcome.result, sampler)
                    place.tokens = tokens_taken(request, kept)
                    return outcome if kept is outcome.result else replace(outcome, result=kept)
            except FellSilent:
                op.begun = None
                self.ledger.memory.end(op.request_id)
                self.ledger.memory.keep(op)

    async def release(self, sampler: Sampler) -> None:
        """Count one user less; free a retired sampler without users."""
        sampler.users -= 1
        sampler.last_used = asyncio.get_running_loop().time()
        if sampler.retired and not sampler.users:
            self.tenants.left(sampler)
            await self._free(sampler)

    async def _sampled(self, op: Op, request: rq.Sample, sampler: Sampler) -> Outcome:
        """Compute a sample, and repeat it after a fault with the same seed.

        Two faults are counted: an engine that dies under the sample, and weights that were lost
        with a machine's memory and are rebuilt. A restarting part and a checkpoint folder that
        cannot be read only delay the sample.
        """
        deaths, rebuilds, attempts = 0, 0, self.config.restart.attempts
        try:
            while True:
                try:
                    return await SAMPLE.execute(op.request_id, request, sampler, self.context)
                except Unavailable as error:
                    log.warning("sample %s waits: %s", op.request_id, error)
                    await asyncio.sleep(LONGEST_PAUSE_S)
                except PartDown as error:  # nothing was begun
                    log.warning("sample %s waits: %s", op.request_id, error)
                    await asyncio.sleep(FIRST_PAUSE_S)  # never in a circle
                except StateLost as error:
                    log.warning("sample %s is run again: %s", op.request_id, error)
                    deaths += 1
                    if deaths >= attempts:
                        raise InternalError(
                            f"{deaths} engines died under this sample, the last one: {error}"
                        ) from None
                except InternalError as error:
                    rebuilds += 1
                    # WeightsGone without missing weights: another sample has rebuilt them since.
                    if rebuilds > attempts or not (
                        await self._rebuilt_weights(sampler) or isinstance(error, WeightsGone)
                    ):
                        raise
                    log.warning(
                        "sample %s is run again with weights that were lost: %s",
                        op.request_id,
                        error,
                    )
        finally:
            self.context.backend.end_stream(op.request_id)

    async def _rebuilt_weights(self, sampler: Sampler) -> bool:
        """Rebuild a sampler's lost weights from its model. Return False when none were missing."""
        model = self.tenants.models.get(sampler.owner or "")
        backend = self.replayer.backend
        try:
            if model is None or await backend.has_sampler(sampler.weights):
                return False
        except StateLost:
            return True
        model_id, progress = model.spec.model_id, self.replayer.progress
        if model_id in progress:
            async with progress[model_id].lock:
                # An unload that came first has rebuilt them.
                if model_id in progress and not await backend.has_sampler(sampler.weights):
                    await self.replayer.restore(model, (sampler.weights.version,))
        return True

    async def retire_all_of(self, session_id: str) -> None:
        ended = self.tenants.samplers_of(session_id)
        for sampler in ended:
            self.queue.forget(sampler.sampler_id)
        await self.retire(ended)

    async def retire(self, samplers: Iterable[Sampler]) -> None:
        """Refuse new samples; free the weights when the last accepted sample is answered."""
        unused = [sampler for sampler in samplers if self.tenants.retire(sampler)]
        for sampler in unused:
            await self._free(sampler)

    async def _free(self, sampler: Sampler) -> None:
        sampler_id = sampler.sampler_id
        written = await self.ledger.write_until_stored(
            SamplerRetired(sampler_id), unless=lambda: self.tenants.is_opened(sampler_id)
        )
        if written:
            self.queue.forget(sampler_id)
            self.completions.forget(sampler_id)
        await self._drop(sampler.weights)

    async def free_left(self) -> None:
        """Free weights of retired samplers again: a killed controller may have left their files."""
        for weights in await self.replayer.journal.retired_weights():
            await self._drop(weights)

    async def _drop(self, weights: SamplerWeights) -> None:
        """Free weights that no other sampler has, as samplers of one checkpoint do."""
        if weights.parts and not self.tenants.has_version(weights.version):
            what_fails = f"files of version {weights.version} were not freed"
            await attempt(what_fails, self.context.backend.drop_sampler(weights))


def tokens_taken(request: rq.Sample, result: Result) -> int:
    """Return the number of tokens of a sample's prompt and results."""
    sampled = (
        sum(len(one.tokens) for one in result.sequences) if isinstance(result, SampleOutput) else 0
    )
    return len(request.prompt) + sampled
