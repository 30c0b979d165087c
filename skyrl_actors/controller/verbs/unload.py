"""Delete a model."""

from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs.verb import AnsweredOp, ModelTables, ModelVerb, VerbContext
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.requests import Unload


class UnloadVerb(ModelVerb[Unload]):
    """Delete a model. Its samplers keep their weights."""

    is_repeatable = True
    ends_model = True
    needs = "nothing"

    def accepted(self, request: Unload, context: VerbContext) -> None:
        model_id = request.model_id
        context.capacity.withdraw(
            model_id, f"model {model_id} was unloaded before there was room for it"
        )

    async def execute(self, op: Op, request: Unload, context: VerbContext) -> Outcome:
        model = context.tenants.models.get(request.model_id)
        if model is not None and model.ready:
            await context.past.keep_samplers(model)
            try:
                await context.backend.delete_model(model.spec)
            except StateLost:  # restarted ranks do not hold the model
                if context.tenants.needed_samplers(request.model_id):
                    raise  # the weights of its samplers are lost too, and are rebuilt first
        return Outcome(rs.Unloaded(request.model_id))

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        """Remove the model, also when the ranks failed to delete it: they free it at a restart."""
        tables.remove(model.spec.model_id)
