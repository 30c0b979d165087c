"""Execute requests with backend calls and checkpoint files: one method for each verb."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from skyrl_actors.backends.backend import Backend
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.admission import check_fits
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.ledger import Op, Outcome
from skyrl_actors.controller.pinning import change_of, change_text
from skyrl_actors.controller.tenants import Model, Sampler, TenantTable
from skyrl_actors.journal.entries import SamplerOpened
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    StateLost,
    UserError,
)
from skyrl_actors.messages.model import CheckpointForm, ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_name, parse_path
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.results import Failure
from skyrl_actors.messages.weights import SamplerWeights

T = TypeVar("T")
Fork = Callable[[ModelSpec, str, int, bool], Awaitable[None]]


class Executor:
    """Execute requests for the lanes.

    `fork(spec, path, number, with_optimizer)` rebuilds a past step of another model as `spec`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        backend: Backend,
        tenants: TenantTable,
        folders: CheckpointFolders,
        disk: Disk,
        fork: Fork,
    ):
        self.config = config
        self.backend = backend
        self.tenants = tenants
        self.folders = folders
        self._fork = fork
        self.disk = disk
        self._verbs: dict[type, Callable[[Op, Any], Awaitable[Outcome]]] = {
            rq.CreateModel: self.create_model,
            rq.ForwardBackward: self.forward_backward,
            rq.OptimStep: self.optim_step,
            rq.SaveWeights: self.save_weights,
            rq.SaveForSampler: self.save_for_sampler,
            rq.SaveExternal: self.save_external,
            rq.LoadWeights: self.load_weights,
            rq.Unload: self.unload,
        }

    async def run(self, op: Op, request: rq.Request) -> Outcome:
        """Execute a request of a model. Raises UserError, Unavailable or InternalError."""
        return await self._verbs[type(request)](op, request)

    async def create_model(self, op: Op, request: rq.CreateModel) -> Outcome:
        await self.backend.create_model(
            request.spec, OpPrecondition(op.number, None, op.request_id)
        )
        result: rs.Result = rs.ModelCreated(request.model_id)
        if request.from_path:
            result = await self._fill(request.spec, op, request.from_path, request.with_optimizer)
        await self.disk.note(
            request.model_id,
            self.folders.note_run,
            request.spec,
            request.session_id,
            request.user_metadata,
        )
        self.tenants.models[request.model_id].ready = True
        return Outcome(result, "applied")

    async def read(self, read: Callable[..., T], *arguments: Any) -> T:
        """Read checkpoint files on a thread."""
        return await self.disk.read(read, *arguments)

    async def _fill(self, spec: ModelSpec, op: Op, path: str, with_optimizer: bool) -> rs.Loaded:
        """Load a checkpoint or a past step into a new model. Delete the model if that fails."""
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.backend.delete_model, spec)
            try:
                loaded = await self._loaded(spec, op, path, with_optimizer)
            except StateLost:
                undo.pop_all()  # the restarted ranks do not hold the model
                raise
            undo.pop_all()
            return loaded

    async def _loaded(self, spec: ModelSpec, op: Op, path: str, with_optimizer: bool) -> rs.Loaded:
        where = parse_path(path)
        if where.kind == "steps":
            await self._fork(spec, path, op.number, with_optimizer)
            return rs.Loaded(spec.model_id, path)
        refuse_export(where)
        folder, saved, version = await self.disk.read(self.folders.found, where)
        check_fits(spec, saved, path, with_optimizer)
        precondition = OpPrecondition(op.number, op.number, op.request_id)
        await self.backend.load_checkpoint(spec, precondition, str(folder), with_optimizer)
        return rs.Loaded(spec.model_id, path, version)

    async def forward_backward(self, op: Op, request: rq.ForwardBackward) -> Outcome:
        model = self._ready(request.model_id)
        precondition = op.reading if request.forward_only else op.precondition
        loss = _loss(model, request)
        result = await self.backend.forward_backward(
            model.spec, precondition, request.columns, loss, request.forward_only
        )
        return Outcome(result, "none" if request.forward_only else "applied")

    async def optim_step(self, op: Op, request: rq.OptimStep) -> Outcome:
        """Apply the pending gradients. Refuse when a forward_backward since the last step failed.

        Such a step would apply a part of the batch only.
        """
        model = self._ready(request.model_id)
        if model.incomplete is not None:
            await self.backend.drop_gradients(model.spec, op.precondition)
            text = (
                "not applied: a forward_backward since the last step failed "
                f"({model.incomplete}); gradients were dropped"
            )
            return Outcome(Failure.of(InternalError(text)), "dropped")
        try:
            metrics = await self.backend.optim_step(model.spec, op.precondition, request.adam)
        except UserError as error:
            return Outcome(Failure.of(error), "dropped")
        return Outcome(rs.StepDone(metrics), "applied")

    async def save_weights(self, op: Op, request: rq.SaveWeights) -> Outcome:
        model = self._ready(request.model_id)
        path = TinkerPath(request.model_id, "weights", checked_name(request.name))
        folder, is_saved = await self.disk.read(
            self.folders.to_save, path, request.overwrite, op.request_id
        )
        if not is_saved:
            await self.backend.save_checkpoint(
                model.spec, op.reading, str(folder), form="training", mark=op.request_id
            )
        await self.disk.note(
            request.model_id, self.folders.note, folder, request.user_metadata, request.ttl_seconds
        )
        return Outcome(rs.Saved(str(path), str(folder)))

    async def save_for_sampler(self, op: Op, request: rq.SaveForSampler) -> Outcome:
        model = self._ready(request.model_id)
        self.tenants.policy(request.model_id)
        if request.name is not None:
            path = TinkerPath(request.model_id, "sampler_weights", checked_name(request.name))
            folder, is_saved = await self.disk.read(
                self.folders.to_save, path, False, op.request_id
            )
            if not is_saved:
                await self.backend.save_checkpoint(
                    model.spec, op.reading, str(folder), form="weights", mark=op.request_id
                )
            await self.disk.note(
                request.model_id,
                self.folders.note,
                folder,
                request.user_metadata,
                request.ttl_seconds,
            )
            return Outcome(rs.SamplerSaved(None, str(path), str(path)))
        if request.sampler_id is None:
            raise InternalError("save_for_sampler needs a name or a sampler id")
        weights = await self.backend.save_for_sampler(
            model.spec, op.reading, f"{request.model_id}@{model.versions + 1}"
        )
        base = model.spec.base_model
        opened = SamplerOpened(
            request.sampler_id, model.session_id, base, None, weights, request.model_id, op.number
        )
        size = sum(part.num_bytes for part in weights.parts)
        seconds = sum(part.write_s for part in weights.parts)
        return Outcome(
            rs.SamplerSaved(request.sampler_id, None, weights.version, size, seconds),
            entries=(opened,),
        )

    async def save_external(self, op: Op, request: rq.SaveExternal) -> Outcome:
        model = self._ready(request.model_id)
        path = TinkerPath(request.model_id, "external_weights", checked_name(request.name))
        folder, is_saved = await self.disk.read(self.folders.to_save, path, False, op.request_id)
        is_merged = model.spec.lora is not None and self.config.lora.external == "merged"
        form: CheckpointForm = "merged" if is_merged else "weights"
        if not is_saved:
            await self.backend.save_checkpoint(
                model.spec, op.reading, str(folder), form=form, mark=op.request_id
            )
        await self.disk.note(request.model_id, self.folders.note, folder, {}, request.ttl_seconds)
        size = await self.disk.read(self.folders.size_for_others, path)
        return Outcome(rs.Saved(str(path), str(folder), size))

    async def load_weights(self, op: Op, request: rq.LoadWeights) -> Outcome:
        model = self._ready(request.model_id)
        folder, version, path = await self._loadable(request.path, model.spec)
        mixed = None
        if request.mixed_with is not None:
            if not 0 < request.share < 1:
                raise InvalidRequest(
                    f"share {request.share} of a mixture: use more than 0 and less than 1"
                )
            mixed = str((await self._loadable(request.mixed_with, model.spec))[0]), request.share
        if request.with_optimizer and path.kind != "weights":
            raise InvalidRequest(
                f"{path} has no optimizer state; only tinker://<model id>/weights/<name> does"
            )
        await self.backend.load_checkpoint(
            model.spec, op.precondition, str(folder), request.with_optimizer, mixed
        )
        return Outcome(rs.Loaded(request.model_id, request.path, version), "applied")

    async def _loadable(self, text: str, spec: ModelSpec) -> tuple[Path, str, TinkerPath]:
        """Return the folder, version and path of a checkpoint that fits the model."""
        path = parse_path(text)
        if path.kind == "steps":
            raise InvalidRequest(
                f"{path} is a past step, which cannot be loaded into a model; "
                "create a model from it"
            )
        refuse_export(path)
        folder, saved, version = await self.disk.read(self.folders.found, path)
        if replace(saved, model_id="", seed=0) != replace(spec, model_id="", seed=0):
            raise InvalidRequest(
                f"{path} holds {saved}; model {spec.model_id} is {spec}: they must agree"
            )
        return folder, version, path

    async def unload(self, op: Op, request: rq.Unload) -> Outcome:
        model = self.tenants.models.get(request.model_id)
        if model is not None and model.ready:
            try:
                await self.backend.delete_model(model.spec)
            except StateLost:  # restarted ranks do not hold the model
                if any(s.owner == request.model_id for s in self.tenants.samplers.values()):
                    raise  # the weights of its samplers are lost too, and are rebuilt first
        return Outcome(rs.Unloaded(request.model_id))

    async def open_sampler(
        self, sampler_id: str, session_id: str | None, base_model: str, path: str | None
    ) -> Sampler:
        """A sampler of the base model or of a saved checkpoint."""
        weights = SamplerWeights("base")
        if path is not None:
            where = parse_path(path)
            if where.kind != "sampler_weights":
                raise InvalidRequest(
                    f"{path} may be overwritten by training; "
                    "sample from what save_weights_for_sampler saved"
                )
            folder, spec, version = await self.disk.read(self.folders.found, where)
            if spec.role == "critic":
                raise InvalidRequest(
                    f"{path} is a critic: it has values, not tokens, and cannot be sampled"
                )
            if spec.base_model != base_model:
                raise InvalidRequest(
                    f"{path} belongs to base model {spec.base_model!r}; "
                    f"this service has {base_model!r}"
                )
            weights = await self.backend.open_sampler(str(folder), version)
        return Sampler(sampler_id, base_model, path, weights, session_id)

    async def sample(self, request_id: str, request: rq.Sample, sampler: Sampler) -> Outcome:
        """Compute a sample.

        Raises NotFound when the sampler's checkpoint was deleted or saved again since it was
        opened.
        """
        if (change := await self.read(change_of, self.folders, sampler)) is not None:
            raise NotFound(change_text(sampler, change))
        output = await self.backend.sample(
            request_id, request.prompt, request.params, sampler.weights
        )
        # Checked again, because an engine may load the files at any time until it answers.
        if await self.read(change_of, self.folders, sampler) == "saved again":
            raise NotFound(change_text(sampler, "saved again"))
        return Outcome(output)

    def _ready(self, model_id: str) -> Model:
        model = self.tenants.model(model_id)
        if not model.ready:
            raise InvalidRequest(f"model {model_id} was not created: its create request failed")
        return model


def refuse_export(path: TinkerPath) -> None:
    """Raise InvalidRequest for a checkpoint that was exported for other tools."""
    if path.kind == "external_weights":
        raise InvalidRequest(
            f"{path} was written for other tools; load from tinker://{path.model_id}/weights/<name>"
        )


def _loss(model: Model, request: rq.ForwardBackward) -> Any:
    plain_values = model.spec.role == "critic" and "returns" not in request.columns.fields
    return None if plain_values else request.loss
