"""Save weights in the format of Hugging Face or peft."""

from collections.abc import Mapping

from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.verbs.saving import check_ttl, save
from skyrl_actors.controller.verbs.verb import ModelVerb, VerbContext
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.model import CheckpointForm, ModelSpec
from skyrl_actors.messages.paths import TinkerPath, checked_name
from skyrl_actors.messages.requests import SaveExternal
from skyrl_actors.storage import age_files


class SaveExternalVerb(ModelVerb[SaveExternal]):
    """Save weights for other tools as tinker://<model_id>/external_weights/<name>."""

    def check(
        self,
        request: SaveExternal,
        spec: ModelSpec | None,
        config: ClusterConfig,
        able: Capabilities,
    ) -> SaveExternal:
        check_ttl(request.ttl_seconds)
        age_files.recipients_of(request.recipients)
        return request

    def usage(self, request: SaveExternal, result: rs.Result) -> Mapping[str, int]:
        return {"checkpoints": 1}

    async def execute(self, op: Op, request: SaveExternal, context: VerbContext) -> Outcome:
        model = context.ready_model(request.model_id)
        path = TinkerPath(request.model_id, "external_weights", checked_name(request.name))
        lora = context.configs.of(model.spec.base_model).lora
        is_merged = model.spec.lora is not None and lora.external == "merged"
        form: CheckpointForm = "merged" if is_merged else "weights"
        folder = await save(
            op,
            model,
            path,
            context,
            form=form,
            user_metadata={},
            ttl_seconds=request.ttl_seconds,
            recipients=request.recipients,
        )
        size = await context.disk.read(context.folders.size_for_others, path)
        return Outcome(rs.Saved(str(path), str(folder), size))
