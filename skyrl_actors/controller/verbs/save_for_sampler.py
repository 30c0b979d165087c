"""Save weights for sampling."""

from collections.abc import Mapping

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.admission import check_metadata
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.tenants import Model
from skyrl_actors.controller.verbs.saving import check_ttl, save
from skyrl_actors.controller.verbs.verb import AnsweredOp, ModelTables, ModelVerb, VerbContext
from skyrl_actors.journal.entries import SamplerOpened
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Conflict, InternalError, InvalidRequest
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_id, checked_name
from skyrl_actors.messages.requests import SaveForSampler


class SaveForSamplerVerb(ModelVerb[SaveForSampler]):
    """Save a named checkpoint of weights, or an unnamed version for one sampler."""

    def check(
        self,
        request: SaveForSampler,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> SaveForSampler:
        if spec is not None and spec.role == "critic":
            raise InvalidRequest(
                f"{spec.model_id} is a critic: it has values, not tokens, and cannot be sampled"
            )
        if request.sampler_id is not None:
            checked_id(request.sampler_id, "sampler id")
        check_ttl(request.ttl_seconds)
        check_metadata(request.user_metadata)
        return request

    def usage(self, request: SaveForSampler, result: rs.Result) -> Mapping[str, int]:
        return {} if request.name is None else {"checkpoints": 1}

    async def execute(self, op: Op, request: SaveForSampler, context: VerbContext) -> Outcome:
        model = context.ready_model(request.model_id)
        if request.name is None:
            return await self._unnamed(op, request, model, context)
        path = TinkerPath(request.model_id, "sampler_weights", checked_name(request.name))
        await save(
            op,
            model,
            path,
            context,
            form="weights",
            user_metadata=request.user_metadata,
            ttl_seconds=request.ttl_seconds,
        )
        return Outcome(rs.SamplerSaved(sampler_id=None, path=str(path), version=str(path)))

    async def _unnamed(
        self, op: Op, request: SaveForSampler, model: Model, context: VerbContext
    ) -> Outcome:
        if request.sampler_id is None:
            raise InternalError("save_for_sampler needs a name or a sampler id")
        if context.tenants.had_sampler(request.sampler_id):
            raise Conflict(
                f"sampler {request.sampler_id} exists; use another sampling_session_seq_id"
            )
        context.check_samplers(request.sampler_id, model.spec.model_id)
        weights = await context.backend.save_for_sampler(
            model.spec, op.reading, f"{request.model_id}@{model.versions + 1}"
        )
        opened = SamplerOpened(
            sampler_id=request.sampler_id,
            session_id=model.session_id,
            base_model=model.spec.base_model,
            model_path=None,
            weights=weights,
            owner=request.model_id,
            number=op.number,
        )
        size = sum(part.num_bytes for part in weights.parts)
        seconds = sum(part.write_s for part in weights.parts)
        return Outcome(
            rs.SamplerSaved(
                sampler_id=request.sampler_id,
                path=None,
                version=weights.version,
                num_bytes=size,
                write_s=seconds,
            ),
            entries=(opened,),
        )

    def fold(self, model: Model, op: AnsweredOp, tables: ModelTables, now: float) -> None:
        super().fold(model, op, tables, now)
        model.versions += 1
