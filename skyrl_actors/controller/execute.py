"""What each request does: backend calls and book-keeping, one function a verb. Called by the lanes."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from skyrl_actors.backends.base import Backend
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.tenants import Model, Sampler, TenantTable
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.paths import TinkerPath, checked_name, parse_path
from skyrl_actors.messages.weights import SamplerWeights


class Executor:
    def __init__(self, config: ClusterConfig, backend: Backend, tenants: TenantTable, folders: CheckpointFolders):
        self.config = config
        self.backend = backend
        self.tenants = tenants
        self.folders = folders
        self._verbs: dict[type, Callable[[Any], Awaitable[rs.Result]]] = {
            rq.CreateModel: self.create_model,
            rq.ForwardBackward: self.forward_backward,
            rq.OptimStep: self.optim_step,
            rq.SaveWeights: self.save_weights,
            rq.SaveForSampler: self.save_for_sampler,
            rq.LoadWeights: self.load_weights,
            rq.Unload: self.unload,
        }

    async def run(self, request: rq.ModelRequest) -> rs.Result:
        return await self._verbs[type(request)](request)

    async def create_model(self, request: rq.CreateModel) -> rs.Result:
        model_id = request.model_id
        try:
            await self.backend.create_model(request.spec)
            if request.from_path:
                await self._fill(model_id, request.from_path, request.with_optimizer)
        except BaseException:
            self.tenants.models.pop(model_id, None)
            raise
        self.tenants.models[model_id].ready = True
        if request.from_path:
            return rs.Loaded(model_id, request.from_path)
        return rs.ModelCreated(model_id)

    async def _fill(self, model_id: str, path: str, with_optimizer: bool) -> None:
        """Load a checkpoint into a model that was just made; a model that can not be filled does not stay."""
        try:
            folder = self.folders.existing(parse_path(path))
            await self.backend.load_checkpoint(model_id, str(folder), with_optimizer)
        except BaseException:
            await self.backend.delete_model(model_id)
            raise

    async def forward_backward(self, request: rq.ForwardBackward) -> rs.Result:
        model = self._ready(request.model_id)
        plain_values = model.spec.role == "critic" and "returns" not in request.columns.fields
        loss = None if plain_values else request.loss
        try:
            return await self.backend.forward_backward(request.model_id, request.columns, loss, request.forward_only)
        except BaseException as error:
            if not request.forward_only:
                model.incomplete = str(error) or type(error).__name__
            raise

    async def optim_step(self, request: rq.OptimStep) -> rs.Result:
        """A step behind a forward_backward that failed would apply a part of what was asked for: it is refused."""
        model = self._ready(request.model_id)
        if model.incomplete is not None:
            reason, model.incomplete = model.incomplete, None
            await self.backend.drop_gradients(request.model_id)
            raise InternalError(f"not applied: a forward_backward since the last step failed ({reason}); gradients were dropped")
        metrics = await self.backend.optim_step(request.model_id, request.adam)
        model.steps += 1
        return rs.StepDone(metrics)

    async def save_weights(self, request: rq.SaveWeights) -> rs.Result:
        self._ready(request.model_id)
        path = TinkerPath(request.model_id, "weights", checked_name(request.name))
        folder = self.folders.new(path, request.overwrite)
        await self.backend.save_checkpoint(request.model_id, str(folder), with_optimizer=True)
        self.folders.note(folder, request.user_metadata)
        return rs.Saved(str(path), str(folder))

    async def save_for_sampler(self, request: rq.SaveForSampler) -> rs.Result:
        model = self._ready(request.model_id)
        self.tenants.policy(request.model_id)
        model.versions += 1
        if request.name is not None:
            path = TinkerPath(request.model_id, "sampler_weights", checked_name(request.name))
            folder = self.folders.new(path, overwrite=False)
            await self.backend.save_checkpoint(request.model_id, str(folder), with_optimizer=False)
            self.folders.note(folder, request.user_metadata)
            return rs.SamplerSaved(None, str(path), str(path))
        if request.sampler_id is None:
            raise InternalError("save_for_sampler needs a name or a sampler id")
        weights = await self.backend.save_for_sampler(request.model_id, f"{request.model_id}@{model.versions}")
        limits = self.config.limits
        keep = limits.lora_sampler_versions if model.spec.lora else limits.full_sampler_versions
        sampler = Sampler(request.sampler_id, model.spec.base_model, None, weights, model.session_id, owner=request.model_id)
        for old in self.tenants.add_sampler(sampler, keep):
            await self.retire(old)
        size = sum(part.num_bytes for part in weights.parts)
        return rs.SamplerSaved(request.sampler_id, None, weights.version, size, sum(p.write_s for p in weights.parts))

    async def load_weights(self, request: rq.LoadWeights) -> rs.Result:
        model = self._ready(request.model_id)
        path = parse_path(request.path)
        saved = self.folders.spec(path)
        if replace(saved, model_id="", seed=0) != replace(model.spec, model_id="", seed=0):
            raise InvalidRequest(f"{path} holds {saved}; model {request.model_id} is {model.spec}: they must agree")
        if request.with_optimizer and path.kind != "weights":
            raise InvalidRequest(f"{path} has no optimizer state; only tinker://<model id>/weights/<name> does")
        await self.backend.load_checkpoint(request.model_id, str(self.folders.existing(path)), request.with_optimizer)
        return rs.Loaded(request.model_id, request.path)

    async def unload(self, request: rq.Unload) -> rs.Result:
        model = self.tenants.models.get(request.model_id)
        if model is not None and model.ready:
            await self.backend.delete_model(request.model_id)
        self.tenants.models.pop(request.model_id, None)
        return rs.Unloaded(request.model_id)

    async def retire(self, sampler: Sampler) -> None:
        """No new samples from it; what it holds is freed when the last accepted one was answered."""
        self.tenants.remove_sampler(sampler.sampler_id)
        sampler.retired = True
        if not sampler.users:
            await self._free(sampler)

    async def release(self, sampler: Sampler) -> None:
        """One accepted sample was answered."""
        sampler.users -= 1
        if sampler.retired and not sampler.users:
            await self._free(sampler)

    async def _free(self, sampler: Sampler) -> None:
        if sampler.owner is not None:  # named checkpoints keep their files
            await self.backend.drop_sampler(sampler.weights)

    async def open_sampler(self, sampler_id: str, session_id: str | None, base_model: str, path: str | None) -> Sampler:
        """A sampler of the base model or of a saved checkpoint."""
        weights = SamplerWeights("base")
        if path is not None:
            where = parse_path(path)
            if where.kind != "sampler_weights":
                raise InvalidRequest(f"{path} may be overwritten by training; sample from what save_weights_for_sampler saved")
            spec = self.folders.spec(where)
            if spec.role == "critic":
                raise InvalidRequest(f"{path} is a critic: it has values, not tokens, and can not be sampled")
            if spec.base_model != base_model:
                raise InvalidRequest(f"{path} belongs to base model {spec.base_model!r}; this service has {base_model!r}")
            weights = await self.backend.open_sampler(str(self.folders.existing(where)), self.folders.version(where))
        sampler = Sampler(sampler_id, base_model, path, weights, session_id)
        self.tenants.add_sampler(sampler, keep=1)
        return sampler

    async def sample(self, request_id: str, request: rq.Sample, sampler: Sampler) -> rs.Result:
        return await self.backend.sample(request_id, request.prompt, request.params, sampler.weights)

    def _ready(self, model_id: str) -> Model:
        model = self.tenants.model(model_id)
        if not model.ready:
            raise InvalidRequest(f"model {model_id} was not created: its create request failed")
        return model
