"""Routes for models and their training: create, forward, backward, step, save, load."""

from typing import Any

from fastapi import APIRouter, Request

from skyrl_actors.api import translate, wire
from skyrl_actors.api.access import caller_of, note_admin, readable
from skyrl_actors.api.batches import read_batch
from skyrl_actors.api.state import state_of
from skyrl_actors.losses.custom_graph import loss_id_of
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import parse_path
from skyrl_actors.messages.requests import ModelRequest, Unload

router = APIRouter()


@router.post("/create_model")
async def create_model(body: wire.CreateModel, request: Request) -> dict[str, Any]:
    """Create a LoRA model, or with rank 0 a full fine-tune.

    `user_metadata.model_role` is policy or critic.
    """
    lora = state_of(request).configs.of(body.base_model).lora
    return await _submitted(request, translate.create_model(body, lora.alpha))


async def _submitted(request: Request, wanted: ModelRequest) -> dict[str, Any]:
    """Submit a request; /retrieve_future resolves it. A model's id begins with its session's id."""
    caller = caller_of(request)
    caller.own(wanted.model_id, "model")
    return {
        "request_id": await state_of(request).client.submit(wanted, caller.mark),
        "model_id": wanted.model_id,
    }


@router.post("/get_info")
async def get_info(body: wire.ModelRef, request: Request) -> dict[str, Any]:
    """Describe a model and the location of its tokenizer."""
    state = state_of(request)
    spec = (await state.client.calls.get_model(caller_of(request).own(body.model_id, "model"))).spec
    able = (await state.bases()).of(spec.base_model)
    return {
        "type": "get_info",
        "model_id": spec.model_id,
        "model_name": spec.base_model,
        "is_lora": spec.lora is not None,
        "lora_rank": spec.lora.rank if spec.lora else None,
        "optimizer_config": {"type": spec.optimizer},
        "model_data": {
            "arch": spec.role,
            "model_name": spec.base_model,
            "tokenizer_id": able.base_folder,
        },
    }


@router.post("/forward_backward")
async def forward_backward(request: Request) -> dict[str, Any]:
    """Add the gradient of a loss. With `forward_only`, compute the loss only.

    See [Losses](losses.md).
    """
    return await _submitted(request, await read_batch(request, forward_only=False))


@router.post("/forward")
async def forward(request: Request) -> dict[str, Any]:
    """Compute a loss without its gradient, for SDKs before 0.25."""
    return await _submitted(request, await read_batch(request, forward_only=True))


@router.post("/optim_step")
async def optim_step(body: wire.OptimStep, request: Request) -> dict[str, Any]:
    """Make an optimizer step with the gradients since the last step (zeros if there are none).

    The body has all settings.
    """
    return await _submitted(request, translate.optim_step(body))


@router.post("/save_weights")
async def save_weights(body: wire.SaveWeights, request: Request) -> dict[str, Any]:
    """Save a training checkpoint: weights and optimizer state."""
    return await _submitted(request, translate.save_weights(body))


@router.post("/save_weights_for_sampler")
async def save_for_sampler(body: wire.SaveForSampler, request: Request) -> dict[str, Any]:
    """Save weights for sampling, under a name or for a new sampling session."""
    return await _submitted(request, translate.save_for_sampler(body))


@router.post("/save_weights_external")
async def save_external(body: wire.SaveExternal, request: Request) -> dict[str, Any]:
    """Save weights for other tools.

    The result is an adapter in PEFT format or a merged model (`lora.external`).
    """
    return await _submitted(request, translate.save_external(body))


@router.post("/load_weights")
async def load_weights(body: wire.LoadWeights, request: Request) -> dict[str, Any]:
    """Load weights into a model (`model_id`) or a new model (`session_id`, `model_seq_id`).

    `tinker://<model id>/steps/<n>` is also allowed.
    """
    wanted = translate.load_weights(body)
    await readable(request, parse_path(body.path), body.weights_access_token)
    return await _submitted(request, wanted)


@router.post("/unload_model")
async def unload_model(body: wire.ModelRef, request: Request) -> dict[str, Any]:
    """Free a model."""
    caller_of(request).own(body.model_id, "model")
    await note_admin(request, "unload", body.model_id)
    return await _submitted(request, Unload(body.model_id))


@router.post("/create_custom_loss")
async def create_custom_loss(body: wire.CreateCustomLoss, request: Request) -> dict[str, Any]:
    """Register a custom loss. The answer has the form of a future.

    Its id is the id of the loss, which contains the loss.
    """
    caller_of(request).own(body.session_id, "session")
    if not state_of(request).config.http.sdk["custom_loss_server_side"]:
        raise NotFound(
            "custom losses run on the client here; "
            "http.sdk.custom_loss_server_side=true lets the workers run them"
        )
    return {
        "request_id": loss_id_of(body.name, [one.model_dump() for one in body.inputs], body.graph)
    }


@router.post("/weights_info")
async def weights_info(body: wire.TinkerPathRef, request: Request) -> dict[str, Any]:
    """Describe the contents of a checkpoint."""
    path = await readable(request, parse_path(body.tinker_path))
    spec: ModelSpec = await state_of(request).client.calls.checkpoint_spec(path)
    answer: dict[str, Any] = {
        "base_model": spec.base_model,
        "is_lora": spec.lora is not None,
        "optimizer_config": {"type": spec.optimizer},
    }
    if spec.lora:
        lora = spec.lora
        answer |= {
            "lora_rank": lora.rank,
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }
    return answer
