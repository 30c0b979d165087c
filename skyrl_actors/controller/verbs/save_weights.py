"""Save a training checkpoint."""

from collections.abc import Mapping

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.admission import check_metadata
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.verbs.saving import check_ttl, save
from skyrl_actors.controller.verbs.verb import ModelVerb, VerbContext
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_name
from skyrl_actors.messages.requests import SaveWeights


class SaveWeightsVerb(ModelVerb[SaveWeights]):
    """Save weights and optimizer state as tinker://<model_id>/weights/<name>."""

    def check(
        self,
        request: SaveWeights,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> SaveWeights:
        check_ttl(request.ttl_seconds)
        check_metadata(request.user_metadata)
        return request

    def usage(self, request: SaveWeights, result: rs.Result) -> Mapping[str, int]:
        return {"checkpoints": 1}

    async def execute(self, op: Op, request: SaveWeights, context: VerbContext) -> Outcome:
        model = context.ready_model(request.model_id)
        path = TinkerPath(request.model_id, "weights", checked_name(request.name))
        folder = await save(
            op,
            model,
            path,
            context,
            form="training",
            overwrite=request.overwrite,
            user_metadata=request.user_metadata,
            ttl_seconds=request.ttl_seconds,
        )
        return Outcome(rs.Saved(str(path), str(folder)))
