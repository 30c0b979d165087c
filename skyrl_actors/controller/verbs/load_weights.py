"""Load a checkpoint into a model."""

from dataclasses import replace
from pathlib import Path

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.verbs.verb import ModelVerb, ReplayedOp, VerbContext
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Corrupt, InvalidRequest
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path, refuse_export
from skyrl_actors.messages.requests import LoadWeights


class LoadWeightsVerb(ModelVerb[LoadWeights]):
    """Load a checkpoint, or a mixture of two."""

    is_repeatable = True
    can_read_files = True

    def check(
        self,
        request: LoadWeights,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> LoadWeights:
        parse_path(request.path)
        return request

    async def execute(self, op: Op, request: LoadWeights, context: VerbContext) -> Outcome:
        model = context.ready_model(request.model_id)
        folder, version, path = await _loadable(request.path, model.spec, context)
        mixed = None
        if request.mixed_with is not None:
            if not 0 < request.share < 1:
                raise InvalidRequest(
                    f"share {request.share} of a mixture: use more than 0 and less than 1"
                )
            other, _, _ = await _loadable(request.mixed_with, model.spec, context)
            mixed = str(other), request.share
        if request.with_optimizer and path.kind != "weights":
            raise InvalidRequest(
                f"{path} has no optimizer state; only tinker://<model id>/weights/<name> does"
            )
        await context.backend.load_checkpoint(
            model.spec, op.precondition, str(folder), request.with_optimizer, mixed
        )
        return Outcome(rs.Loaded(request.model_id, request.path, version), "applied")

    async def replay(self, op: ReplayedOp[LoadWeights]) -> None:
        """Load the checkpoint again if it is unchanged. Raises Corrupt otherwise."""
        request, number = op.request, op.operation.number
        path, result = parse_path(request.path), await op.journal.result(op.operation)
        if request.mixed_with is not None:
            raise Corrupt(
                f"operation {number} mixed two checkpoints, which cannot be "
                "replayed, and the snapshot after it is lost"
            )
        folder = await op.disk.read(op.folders.existing, path)
        is_same = isinstance(result, rs.Loaded) and await op.disk.read(
            op.folders.is_version, path, result.version
        )
        if not is_same:
            raise Corrupt(
                f"{path} was changed since operation {number} loaded it, and the "
                "snapshot after it is lost"
            )
        await op.backend.load_checkpoint(
            op.spec, op.precondition, str(folder), request.with_optimizer
        )


async def _loadable(
    text: str, spec: ModelSpec, context: VerbContext
) -> tuple[Path, str, TinkerPath]:
    """Return the folder, version and path of a checkpoint that fits the model."""
    path = parse_path(text)
    if path.kind == "steps":
        raise InvalidRequest(
            f"{path} is a past step, which cannot be loaded into a model; create a model from it"
        )
    refuse_export(path)
    folder, saved, version = await context.disk.read(context.folders.found, path)
    if replace(saved, model_id="", seed=0) != replace(spec, model_id="", seed=0):
        raise InvalidRequest(
            f"{path} holds {saved}; model {spec.model_id} is {spec}: they must agree"
        )
    return folder, version, path
