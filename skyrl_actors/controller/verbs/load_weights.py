"""Load a checkpoint into a model."""

import asyncio
from dataclasses import replace
from pathlib import Path

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
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
from skyrl_actors.messages.errors import Corrupt, InvalidRequest, StateLost, Unavailable
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path, refuse_export
from skyrl_actors.messages.requests import LoadWeights

CHECKS, CHECK_PAUSE_S = 10, 0.5


class LoadWeightsVerb(ModelVerb[LoadWeights]):
    """Load a checkpoint, or a mixture of two."""

    is_repeatable = True
    settles = True
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
        read, mixed = [(path, version)], None
        if request.mixed_with is not None:
            if not 0 < request.share < 1:
                raise InvalidRequest(
                    f"share {request.share} of a mixture: use more than 0 and less than 1"
                )
            other, of_other, its_path = await _loadable(request.mixed_with, model.spec, context)
            read.append((its_path, of_other))
            mixed = str(other), request.share
        if request.with_optimizer and path.kind != "weights":
            raise InvalidRequest(
                f"{path} has no optimizer state; only tinker://<model id>/weights/<name> does"
            )
        await context.backend.load_checkpoint(
            model.spec, op.precondition, str(folder), request.with_optimizer, mixed
        )
        for place, of_place in read:
            await check_loaded(place, of_place, context.folders, context.disk)
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
        if not isinstance(result, rs.Loaded) or not await op.disk.read(
            op.folders.is_version, path, result.version
        ):
            raise Corrupt(
                f"{path} was changed since operation {number} loaded it, and the "
                "snapshot after it is lost"
            )
        await op.backend.load_checkpoint(
            op.spec, op.precondition, str(folder), request.with_optimizer
        )
        await check_loaded(path, result.version, op.folders, op.disk)

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        super().fold(model, op, tables, now)
        if op.effect != "none":  # it dropped the pending gradients
            model.incomplete = None


async def check_loaded(
    path: TinkerPath, version: str, folders: CheckpointFolders, disk: Disk
) -> None:
    """Raise StateLost if a checkpoint was saved again since it had this version.

    Then some ranks may have loaded the old weights, and others the new ones. A repeat of the
    operation would not load them again, so what cannot be read counts as saved again.
    """
    for _ in range(CHECKS):
        try:
            if await disk.read(is_saved_again, folders, path, version):
                raise StateLost(f"{path} was saved again while it was loaded")
            return
        except Unavailable:
            await asyncio.sleep(CHECK_PAUSE_S)
    raise StateLost(f"{path} cannot be read again after it was loaded")


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
