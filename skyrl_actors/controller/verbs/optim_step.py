"""Make an optimizer step with the pending gradients."""

import math

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
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import InternalError, InvalidRequest, UserError
from skyrl_actors.messages.model import AdamParams, ModelSpec
from skyrl_actors.messages.requests import OptimStep

# 0 in float32 makes 0/0 of a weight whose gradient is 0: the A of a new LoRA.
SMALLEST_EPS = 1e-38


class OptimStepVerb(ModelVerb[OptimStep]):
    """Apply the pending gradients, and refuse when a forward_backward since the last step failed.

    Such a step would apply a part of the batch only.
    """

    is_repeatable = True
    settles = True

    def check(
        self,
        request: OptimStep,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> OptimStep:
        check_adam(request.adam)
        return request

    async def execute(self, op: Op, request: OptimStep, context: VerbContext) -> Outcome:
        model = context.ready_model(request.model_id)
        if model.incomplete is not None:
            await context.backend.drop_gradients(model.spec, op.precondition)
            text = (
                "not applied: a forward_backward since the last step failed "
                f"({model.incomplete}); gradients were dropped"
            )
            return Outcome(rs.Failure.of(InternalError(text)), "dropped")
        try:
            metrics = await context.backend.optim_step(model.spec, op.precondition, request.adam)
        except UserError as error:
            return Outcome(rs.Failure.of(error), "dropped")
        return Outcome(rs.StepDone(metrics), "applied")

    async def replay(self, op: ReplayedOp[OptimStep]) -> None:
        await op.backend.optim_step(op.spec, op.precondition, op.request.adam)

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        progress = tables.progress[model.spec.model_id]
        if advance(progress, op, now) and op.effect == "applied":
            model.steps += 1
            progress.step = model.steps
        if op.effect != "none":
            model.incomplete = None


def check_adam(adam: AdamParams) -> None:
    """Raise InvalidRequest for an AdamW setting that is not finite or is out of range."""
    for name, value, good, allowed in (
        ("learning_rate", adam.learning_rate, adam.learning_rate >= 0, "from 0"),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1, "from 0 to below 1"),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1, "from 0 to below 1"),
        ("eps", adam.eps, adam.eps >= SMALLEST_EPS, f"from {SMALLEST_EPS}"),
        ("weight_decay", adam.weight_decay, adam.weight_decay >= 0, "from 0"),
        ("grad_clip_norm", adam.grad_clip_norm, adam.grad_clip_norm >= 0, "from 0; 0 = none"),
    ):
        if not (math.isfinite(value) and good):
            raise InvalidRequest(
                f"adam_params.{name} is {value}: out of range; use a number {allowed}"
            )
