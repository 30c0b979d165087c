"""Continue after a start: free unloaded models, restore live ones, run unanswered operations."""

from contextlib import suppress

from skyrl_actors.backends.backend import ServedModels
from skyrl_actors.controller.housekeeping import attempt
from skyrl_actors.controller.lanes import Lanes
from skyrl_actors.controller.ledger import Ledger
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.samples import Samples
from skyrl_actors.controller.tasks import Tasks
from skyrl_actors.controller.verbs.verb import VerbContext
from skyrl_actors.messages.errors import InternalError, NotFound
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.results import Failure


class Resumption:
    """What a controller does once, when its tables are complete."""

    def __init__(
        self, context: VerbContext, ledger: Ledger, lanes: Lanes, samples: Samples, tasks: Tasks
    ):
        self._context = context
        self._ledger = ledger
        self._lanes = lanes
        self._samples = samples
        self._tasks = tasks

    async def run(self, unanswered: list[Op], bases: ServedModels) -> None:
        """Free unloaded models, restore live ones, then run unanswered operations."""
        tenants = self._context.tenants
        residents = await self._context.backend.residents()
        for model_id in residents.keys() - tenants.models.keys():
            for able in bases.bases:
                for role in able.roles:
                    spec = ModelSpec(model_id=model_id, base_model=able.base_model, role=role)
                    with suppress(InternalError):  # restarted ranks do not hold it
                        await self._context.backend.delete_model(spec)
        self._context.capacity.begin(bases, residents)
        self._tasks.spawn(self._samples.presence.follow())
        await self._samples.retire(
            [s for s in tenants.samplers.values() if s.session_id not in (None, *tenants.sessions)]
        )
        self._tasks.spawn(self._free_left())
        # Models of a base model without processes are restored when a request has it loaded.
        runs = self._context.backend.runs
        brought_back = {
            model_id: model
            for model_id, model in tenants.models.items()
            if model.ready and runs(model.spec.base_model)
        }
        for model_id, model in brought_back.items():
            self._tasks.spawn(self._lanes.bring_back(model, residents.get(model_id, -1)))
        for op in unanswered:
            session_id = op.header.session_id if op.header else None
            if session_id is not None and session_id not in tenants.sessions:
                if op.model_id is not None:
                    self._ledger.queue.drain(op.model_id)
                text = f"session {session_id} was finished before this ran"
                self._tasks.spawn(self._ledger.answer(op, Outcome(Failure(text, "user"))))
            elif op.model_id is None:
                self._tasks.spawn(self._resume_sample(op))
            elif op.model_id not in brought_back:
                self._lanes.start_next(op.model_id)

    async def _free_left(self) -> None:
        await attempt("files of retired samplers were not freed", self._samples.free_left())

    async def _resume_sample(self, op: Op) -> None:
        try:
            self._samples.start(op, self._context.tenants.sampler(op.stream))
        except NotFound as error:
            await self._ledger.answer(op, Outcome(Failure.of(error)))
