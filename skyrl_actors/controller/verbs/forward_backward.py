"""Compute a loss, and add its gradient."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from skyrl_actors import losses
from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs.verb import (
    AnsweredOp,
    ModelTables,
    ModelVerb,
    ReplayedOp,
    VerbContext,
    advance,
)
from skyrl_actors.losses.custom_graph import graph_of
from skyrl_actors.messages.answer_only import without_fronts
from skyrl_actors.messages.columns import Columns, check_num_datums, offsets_of
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.model import LossCall, ModelSpec
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.requests import ForwardBackward
from skyrl_actors.messages.results import LossOutput, Result


class ForwardBackwardVerb(ModelVerb[ForwardBackward]):
    """Compute a loss, and add its gradient unless the request is forward-only."""

    is_repeatable = True
    failure_matters = True

    def check(
        self,
        request: ForwardBackward,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> ForwardBackward:
        assert spec is not None
        return replace(request, loss=checked_batch(request, spec, config, able))

    async def execute(self, op: Op, request: ForwardBackward, context: VerbContext) -> Outcome:
        model = context.ready_model(request.model_id)
        precondition = op.reading if request.forward_only else op.precondition
        loss = _loss_of(model, request)
        weight = context.admin.quotas.weight(owner_of(request.model_id))
        result = await context.backend.forward_backward(
            model.spec, precondition, request.columns, loss, request.forward_only, weight
        )
        if context.configs.of(model.spec.base_model).router_replay and model.spec.role == "policy":
            result.metrics["replayed_tokens:sum"] = float(request.columns.num_routed)
        return Outcome(
            _as_sent(result, request.columns), "none" if request.forward_only else "applied"
        )

    async def replay(self, op: ReplayedOp[ForwardBackward]) -> None:
        request = op.request
        await op.backend.forward_backward(
            op.spec, op.precondition, request.columns, request.loss, False
        )

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        """Record why the pending gradients are incomplete. The next step is then refused."""
        advance(tables.progress[model.spec.model_id], op, now)
        is_forward_only = isinstance(op.request, ForwardBackward) and op.request.forward_only
        if op.failure is not None and not is_forward_only:
            model.incomplete = op.failure

    def input_tokens(self, request: ForwardBackward) -> int:
        return request.columns.num_tokens

    def usage(self, request: ForwardBackward, result: Result) -> Mapping[str, int]:
        return {"trained_tokens": request.columns.num_tokens}


def _as_sent(result: LossOutput, columns: Columns) -> LossOutput:
    """Return the outputs at the positions for which the client sent inputs."""
    if columns.fronts is None:
        return result
    fields = {
        name: without_fronts(array, result.offsets, columns.fronts)
        for name, array in result.fields.items()
    }
    lengths = np.diff(result.offsets) - columns.fronts
    return replace(result, fields=fields, offsets=offsets_of(lengths.tolist()))


def checked_batch(
    request: ForwardBackward, spec: ModelSpec, config: ClusterConfig, capabilities: Capabilities
) -> LossCall:
    """Check a batch and return its loss call with all options filled in."""
    name = (
        "ppo_critic" if spec.role == "critic" and request.loss.name == "ppo" else request.loss.name
    )
    entry = losses.find(name)
    call = entry.checked(request.loss.config)
    losses.check_inputs(entry, call, spec.role, request.columns, request.forward_only)
    if name == "custom":
        _check_custom(call, request.columns, config)
    columns = request.columns
    check_num_datums(columns.num_rows)
    if columns.num_tokens > config.limits.tokens:
        raise InvalidRequest(
            f"{columns.num_tokens} tokens in one request; "
            f"at most {config.limits.tokens} (limits.tokens)"
        )
    longest = int(columns.lengths.max())
    if longest > capabilities.max_context_tokens:
        raise InvalidRequest(
            f"datum {int(columns.lengths.argmax())} has {longest} tokens; "
            f"{capabilities.base_model} takes {capabilities.max_context_tokens}"
        )
    _check_numbers(columns, capabilities.vocab_size)
    return call


def _check_custom(call: LossCall, columns: Columns, config: ClusterConfig) -> None:
    if not config.http.sdk["custom_loss_server_side"]:
        raise InvalidRequest(
            "loss custom is off in this service (http.sdk.custom_loss_server_side); "
            "compute such a loss in the SDK"
        )
    if columns.fronts is not None:  # a graph may use other positions than those with weights
        raise InvalidRequest(
            "loss custom needs one value of each loss_fn_input for each token of model_input"
        )
    graph = graph_of(str(call.config["loss_id"]))
    if missing := [name for name in graph.inputs if name not in columns.fields]:
        raise InvalidRequest(f"custom loss {graph.name} needs loss_fn_inputs {', '.join(missing)}")
    widths = {0} if columns.widths is None else set(columns.widths.tolist())
    if len(widths) > 1 or (0 in widths) != (graph.ranks[0] == 1):
        raise InvalidRequest(
            f"custom loss {graph.name} was declared for inputs of rank {graph.ranks[0]}; "
            "send all datums with that rank and the same K"
        )


def _check_numbers(columns: Columns, vocab_size: int) -> None:
    for what, array in (("model_input", columns.tokens), (TARGETS, columns.fields.get(TARGETS))):
        if array is not None and (int(array.min()) < 0 or int(array.max()) >= vocab_size):
            raise InvalidRequest(f"{what} has a token id outside 0 to {vocab_size - 1}")
    for name, array in columns.fields.items():
        if name != TARGETS and not np.isfinite(array).all():
            raise InvalidRequest(f"{name} has a value that is not finite")


def _loss_of(model: Model, request: ForwardBackward) -> LossCall | None:
    """Return the loss, or None for a critic's values without a loss."""
    plain_values = model.spec.role == "critic" and "returns" not in request.columns.fields
    return None if plain_values else request.loss
