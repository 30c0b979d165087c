"""Create a model, optionally from a checkpoint or a past step."""

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.admission import LARGEST_INT, check_metadata
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.pinning import is_saved_again
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs.verb import (
    AnsweredOp,
    ModelTables,
    ModelVerb,
    ReplayedOp,
    VerbContext,
)
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Corrupt, InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.model import ROLES, ModelSpec
from skyrl_actors.messages.paths import checked_id, parse_path, refuse_export
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import CreateModel

LOADS = 5  # of a checkpoint that is saved again meanwhile


class CreateModelVerb(ModelVerb[CreateModel]):
    """Create a model. The client chooses its id."""

    needs = "ranks"
    creates_model = True
    can_read_files = True

    def check(
        self,
        request: CreateModel,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> CreateModel:
        """Check what does not depend on the checkpoint that the model starts from."""
        check_metadata(request.user_metadata)
        checked_id(request.model_id, "model id")
        forks = request.from_path is not None and parse_path(request.from_path).kind == "steps"
        return replace(request, spec=settled(request.spec, able, config, forks))

    def reads_files(self, request: CreateModel) -> bool:
        return request.from_path is not None

    async def prepare(self, op: Op, request: CreateModel, context: VerbContext) -> bool:
        await context.capacity.take(op.number, op.request_id, request)
        return True

    async def execute(self, op: Op, request: CreateModel, context: VerbContext) -> Outcome:
        await context.backend.create_model(
            request.spec, OpPrecondition(op.number, None, op.request_id)
        )
        result: rs.Result = rs.ModelCreated(request.model_id)
        if request.from_path:
            result = await _fill(op, request, request.from_path, context)
        await context.disk.note(
            request.model_id,
            context.folders.note_run,
            request.spec,
            request.session_id,
            request.user_metadata,
        )
        context.tenants.models[request.model_id].ready = True
        return Outcome(result, "applied")

    async def undo(self, request: CreateModel, context: VerbContext) -> None:
        if context.capacity.holds(request.model_id):
            with suppress(InternalError):  # some ranks may hold the model
                await context.backend.delete_model(request.spec)

    async def replay(self, op: ReplayedOp[CreateModel]) -> None:
        if op.request.from_path:
            raise Corrupt(
                f"{op.spec.model_id} was created from {op.request.from_path}, and the snapshot "
                "after that is lost"
            )
        await op.backend.create_model(op.spec, OpPrecondition(op.precondition.number))

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        if op.failed:
            tables.remove(model.spec.model_id)


async def _fill(op: Op, request: CreateModel, path: str, context: VerbContext) -> rs.Loaded:
    """Load a checkpoint or a past step into a new model. Delete the model if that fails."""
    async with AsyncExitStack() as undo:
        undo.push_async_callback(context.backend.delete_model, request.spec)
        try:
            loaded = await _loaded(op, request, path, context)
        except StateLost:
            undo.pop_all()  # the restarted ranks do not hold the model
            raise
        undo.pop_all()
        return loaded


async def _loaded(op: Op, request: CreateModel, path: str, context: VerbContext) -> rs.Loaded:
    spec, with_optimizer, where = request.spec, request.with_optimizer, parse_path(path)
    if where.kind == "steps":
        await context.past.fork(spec, path, op.number, with_optimizer)
        return rs.Loaded(spec.model_id, path)
    refuse_export(where)
    for _ in range(LOADS):
        folder, saved, version = await context.disk.read(context.folders.found, where)
        check_fits(spec, saved, path, with_optimizer)
        precondition = OpPrecondition(op.number, op.number, op.request_id)
        await context.backend.load_checkpoint(spec, precondition, str(folder), with_optimizer)
        if not await context.disk.read(is_saved_again, context.folders, where, version):
            return rs.Loaded(spec.model_id, path, version)
        # Some ranks may have the old weights, and others the new ones.
        await context.backend.delete_model(spec)
        await context.backend.create_model(spec, OpPrecondition(op.number, None, op.request_id))
    raise InvalidRequest(
        f"{path} was saved again during each of {LOADS} attempts to load it; use another name"
    )


def settled(
    spec: ModelSpec, capabilities: Capabilities, config: ClusterConfig, forks: bool = False
) -> ModelSpec:
    """Return the spec with what the service decides: `train_tower` and the layout of experts.

    A fork of a past step has the weights of that step, so it keeps its own `train_tower`. If the
    client left `train_unembed` open, an adapter covers the output layer, except on a policy whose
    engines cannot sample that.
    """
    if spec.lora is None:
        group = config.policy if spec.role == "policy" else config.critic
        return spec if forks or group is None else replace(spec, train_tower=group.train_tower)
    unembed = spec.lora.train_unembed
    if unembed is None:
        unembed = spec.role == "critic" or capabilities.adapts_head
    lora = replace(spec.lora, train_unembed=unembed, expert_layout=config.lora.expert_layout)
    return replace(spec, lora=lora)


def spec_from(request: CreateModel, saved: ModelSpec) -> ModelSpec:
    """Return the spec of a model that starts from a checkpoint of `saved`.

    Raises InvalidRequest when the request names another base model or an optimizer that does not
    fit.
    """
    path, base_model = request.from_path or "", request.spec.base_model
    if base_model not in ("", saved.base_model):
        raise InvalidRequest(
            f"base_model is {base_model!r} and {path} belongs to {saved.base_model!r}; "
            "leave base_model out"
        )
    optimizer = request.optimizer or saved.optimizer
    if optimizer != saved.optimizer and (request.with_optimizer or "/steps/" in path):
        raise InvalidRequest(
            f"optimizer_config is {optimizer} and {path} has the state of {saved.optimizer}; "
            "leave optimizer_config out, or load the weights of a checkpoint alone"
        )
    return replace(saved, model_id=request.model_id, optimizer=optimizer)


def check_spec(spec: ModelSpec, config: ClusterConfig, capabilities: Capabilities) -> None:
    """Raise InvalidRequest when this service cannot build such a model."""
    if spec.base_model != capabilities.base_model:
        raise InvalidRequest(
            f"unknown base model {spec.base_model!r}; this service has {capabilities.base_model!r}"
        )
    if not 0 <= spec.seed <= LARGEST_INT:
        raise InvalidRequest(f"seed {spec.seed}: use 0 to 2^62")
    if spec.role not in ROLES:
        raise InvalidRequest(f"model_role {spec.role!r}: use one of {', '.join(ROLES)}")
    if spec.role not in capabilities.roles:
        raise InvalidRequest(f"this service has no {spec.role} group (its config sets it to null)")
    if spec.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise InvalidRequest(
            "optimizer adamw8bit needs the package bitsandbytes, "
            "which is not installed in this service; use adamw"
        )
    if spec.optimizer != "adamw" and spec.lora is None:
        group = config.policy if spec.role == "policy" else config.critic
        strategy = group.full_strategy_on(config.placement.device).type if group else "replica"
        if strategy != "replica":
            raise InvalidRequest(
                f"optimizer {spec.optimizer} is for weights that are held whole; "
                f"this service shards full fine-tunes ({strategy}): use adamw or a LoRA"
            )
    if spec.lora and not 1 <= spec.lora.rank <= config.lora.max_rank:
        raise InvalidRequest(
            f"lora rank {spec.lora.rank}: this service takes 1 to {config.lora.max_rank}, "
            "or 0 for a full fine-tune"
        )
    if (
        spec.lora
        and spec.lora.train_unembed
        and spec.role == "policy"
        and not capabilities.adapts_head
    ):
        raise InvalidRequest(
            "train_unembed true: vLLM takes no adapter on the output layer of "
            f"{capabilities.base_model}, so this model could not be sampled; "
            "set train_unembed=False, train_attn and train_mlp are allowed"
        )
    if spec.lora is None and not config.lora.max_full_models:
        raise InvalidRequest(
            "this service takes no full fine-tunes (lora.max_full_models is 0); use a LoRA"
        )
    memory = capabilities.adapters
    if spec.lora and memory.bytes_of(spec.lora.rank) > memory.limit_bytes:
        raise InvalidRequest(
            f"a LoRA of rank {spec.lora.rank} needs "
            f"{memory.bytes_of(spec.lora.rank) / 2**30:.3g} GiB of host memory, and all LoRA "
            f"models together may take {memory.limit_bytes / 2**30:.3g} (lora.max_host_gib); "
            "use a lower rank"
        )


def check_fits(spec: ModelSpec, saved: ModelSpec, path: str, with_optimizer: bool) -> None:
    """Raise InvalidRequest when the checkpoint at `path` cannot be loaded into this model.

    A critic can be loaded from a policy: it takes all weights except the output layer.
    """
    if saved.base_model != spec.base_model:
        raise InvalidRequest(
            f"{path} belongs to base model {saved.base_model!r}; "
            f"this service has {spec.base_model!r}"
        )
    if saved.role != spec.role and spec.role == "policy":
        raise InvalidRequest(f"{path} is a critic; a policy cannot be made of it")
    if with_optimizer and saved.role != spec.role:
        raise InvalidRequest(
            f"{path} has a {saved.role}'s optimizer state, this model is a {spec.role}; "
            "load its weights alone"
        )
    if with_optimizer and saved.optimizer != spec.optimizer:
        raise InvalidRequest(
            f"{path} has the state of optimizer {saved.optimizer}, this model uses "
            f"{spec.optimizer}; load its weights alone"
        )
    if with_optimizer and saved.train_tower != spec.train_tower:
        raise InvalidRequest(
            f"{path} has train_tower={str(saved.train_tower).lower()}, and this service sets "
            f"{spec.role}.train_tower={str(spec.train_tower).lower()}, so the optimizer state does "
            "not fit; load its weights alone"
        )
    if saved.lora is None or spec.lora is None:
        if saved.lora is not spec.lora:
            kinds = [
                "a full fine-tune" if lora is None else f"a LoRA of rank {lora.rank}"
                for lora in (saved.lora, spec.lora)
            ]
            raise InvalidRequest(
                f"{path} is {kinds[0]}, this model is {kinds[1]}; create one of the same kind"
            )
        return
    differ = [
        f"{name} is {getattr(saved.lora, name)} there and {getattr(spec.lora, name)} here"
        for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed", "expert_layout")
        if getattr(saved.lora, name) != getattr(spec.lora, name)
        and not (spec.role == "critic" and name == "train_unembed")
    ]
    if differ:
        raise InvalidRequest(f"{path} cannot be loaded into this adapter: {'; '.join(differ)}")
