"""What the controller knows about one kind of request.

A verb says how its request is checked, executed, replayed, recorded in the tables, and counted.
Lanes, replay and startup call these methods and do not distinguish kinds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from skyrl_actors.backends.backend import Backend, Capabilities
from skyrl_actors.config.base_configs import BaseConfigs
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.administration import Administration
from skyrl_actors.controller.admission import check_count
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.model_capacity import ModelCapacity
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.router_replay import RouterReplay
from skyrl_actors.controller.storage_quota import StorageQuota
from skyrl_actors.controller.tenants import Model, TenantTable
from skyrl_actors.journal.entries import Effect, Operation
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages.errors import Corrupt, InvalidRequest
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Result

R = TypeVar("R", bound=Request)
Needs = Literal["state", "ranks", "nothing"]
"""What a verb needs before it runs: its model's state in the ranks, live ranks, or nothing."""


class Past(Protocol):
    """Rebuilds earlier states from the journal."""

    async def fork(self, spec: ModelSpec, path: str, number: int, with_optimizer: bool) -> None: ...

    async def keep_samplers(self, model: Model) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbContext:
    """The parts of the controller that verbs use. `configs` are those of the base models."""

    config: ClusterConfig
    configs: BaseConfigs
    backend: Backend
    tenants: TenantTable
    folders: CheckpointFolders
    disk: Disk
    capacity: ModelCapacity
    past: Past
    routes: RouterReplay
    admin: Administration
    storage: StorageQuota

    def ready_model(self, model_id: str) -> Model:
        """Return a live model whose creation succeeded. Raises NotFound or InvalidRequest."""
        model = self.tenants.model(model_id)
        if not model.ready:
            raise InvalidRequest(f"model {model_id} was not created: its create request failed")
        return model

    def check_samplers(
        self, sampler_id: str, model_id: str | None = None, opening: Collection[str] = ()
    ) -> None:
        """Raise CapacityError when the API key of a new sampler has as many as it may have.

        All unnamed versions of a model, `model_id`, count as one. `opening`: ids that are opened
        now.
        """
        most = self.admin.quotas.of(owner_of(sampler_id)).samplers
        if most is None:
            return
        known = {one.owner or one.sampler_id for one in self.tenants.samplers.values()}
        if model_id not in known:
            check_count({*known, *opening}, sampler_id, most, "samplers")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedOp(Generic[R]):
    """An answered operation that is applied to `spec`'s model again."""

    spec: ModelSpec
    precondition: OpPrecondition
    operation: Operation
    request: R
    backend: Backend
    folders: CheckpointFolders
    disk: Disk
    journal: Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredOp:
    """An answered operation, as the tables of models record it.

    `failure` is the message of a failed operation. After a restart, `request` and `failure` are
    read from the journal only for verbs with `failure_matters`.
    """

    number: int
    effect: Effect
    failed: bool
    num_bytes: int
    request: Request | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class ModelTables:
    """The live models and their positions in the journal."""

    tenants: TenantTable
    progress: dict[str, Progress]

    def remove(self, model_id: str) -> None:
        self.tenants.models.pop(model_id, None)
        self.progress.pop(model_id, None)


class Verb(Generic[R]):
    """One kind of request."""

    def check(
        self, request: R, spec: ModelSpec | None, config: ClusterConfig, able: Capabilities
    ) -> R:
        """Return the request with defaults filled in. Raises InvalidRequest.

        `spec` is the spec of its model, None for a sample.
        """
        return request

    def input_tokens(self, request: R) -> int:
        """Return the tokens that a request brings."""
        return 0

    def usage(self, request: R, result: Result) -> Mapping[str, int]:
        """Return what a successful request used, by fields of `Usage`. They are metrics too."""
        return {}


class ModelVerb(Verb[R]):
    """A kind of request to a model. Requests of one model run in order."""

    is_repeatable = False  # it runs again after it raised in ranks that stay alive
    failure_matters = False  # a failure without an effect changes the tables
    creates_model = False
    ends_model = False
    settles = False  # with an effect, no gradients of earlier operations are pending
    can_read_files = False
    needs: Needs = "state"

    def accepted(self, request: R, context: VerbContext) -> None:
        """React to the acceptance of a request, before it runs."""

    async def prepare(self, op: Op, request: R, context: VerbContext) -> bool:
        """Wait for what the first attempt needs. Return whether that can take long."""
        return False

    async def execute(self, op: Op, request: R, context: VerbContext) -> Outcome:
        """Run a request. Raises UserError, Unavailable or InternalError."""
        raise NotImplementedError

    async def undo(self, request: R, context: VerbContext) -> None:
        """Clean up after the last attempt failed."""

    def reads_files(self, request: R) -> bool:
        """Return whether it reads files that can change later.

        Such a request cannot be replayed, so a snapshot follows it before its answer.
        """
        return self.can_read_files

    async def replay(self, op: ReplayedOp[R]) -> None:
        """Apply an answered operation with effect "applied" again."""
        raise Corrupt(f"operation {op.operation.number} ({op.operation.kind}) has no replay")

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        """Record an answered operation in the tables, when it ran and after a restart.

        `now` is the loop time.
        """
        advance(tables.progress[model.spec.model_id], op, now)


def advance(progress: Progress, op: AnsweredOp, now: float) -> bool:
    """Move a model's position to this operation. Return whether it changed the model's state.

    After a restart, the newest snapshot covers operations up to the position.
    """
    if op.effect == "none" or op.number <= progress.position:
        return False
    progress.applied(op.number, op.num_bytes, now)
    return True
