"""Convert wire bodies to requests, and results to wire bodies (pure)."""

import hashlib
from typing import Any, get_args

from skyrl_actors.api import answers, codec, wire
from skyrl_actors.api.pictures import PictureReader
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec, OptimizerName
from skyrl_actors.messages.paths import checked_id, model_id_for, sampler_id_for

PROTOBUF = "application/x-protobuf"
_OPTIMIZERS = " or ".join(", ".join(get_args(OptimizerName)).rsplit(", ", 1))


def create_model(body: wire.CreateModel, alpha: float) -> rq.CreateModel:
    """Build the request. `model_role` can be in user_metadata, which SDK users can set."""
    role: Any = body.model_role or body.user_metadata.get("model_role") or "policy"
    config = body.lora_config
    lora = (
        LoraSpec(
            rank=config.rank,
            alpha=alpha,
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed,
        )
        if config.rank
        else None
    )
    model_id = model_id_for(checked_id(body.session_id, "session id"), body.model_seq_id)
    # The default seed is as random as the session's id, and the same when the request is repeated.
    drawn = int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:4]) >> 1
    seed = drawn if config.seed is None else config.seed
    spec = ModelSpec(
        model_id=model_id,
        base_model=body.base_model,
        role=role,
        lora=lora,
        seed=seed,
        optimizer=body.optimizer_config.type,
    )
    return rq.CreateModel(
        spec=spec, session_id=body.session_id, user_metadata=_strings(body.user_metadata)
    )


def load_weights(body: wire.LoadWeights) -> rq.CreateModel | rq.LoadWeights:
    """With model_id, load into that model; otherwise create a model from the checkpoint.

    The new model's id consists of session_id and model_seq_id.
    """
    if body.model_id is not None:
        _refuse_both(body, "model_id", "session_id")
        _refuse_both(body, "model_id", "model_seq_id")
        for name in ("base_model", "user_metadata", "optimizer_config"):
            if getattr(body, name):
                raise InvalidRequest(f"{name} is for a new model; leave it out with model_id")
        return rq.LoadWeights(
            model_id=body.model_id,
            path=body.path,
            with_optimizer=body.optimizer,
            seq_id=body.seq_id,
        )
    if body.session_id is None or body.model_seq_id is None:
        raise InvalidRequest("load_weights needs model_id, or session_id and model_seq_id")
    model_id = model_id_for(checked_id(body.session_id, "session id"), body.model_seq_id)
    # The controller replaces this spec with the one saved in the checkpoint.
    spec = ModelSpec(model_id=model_id, base_model=body.base_model or "")
    return rq.CreateModel(
        spec=spec,
        session_id=body.session_id,
        user_metadata=_strings(body.user_metadata),
        from_path=body.path,
        with_optimizer=body.optimizer,
        optimizer=body.optimizer_config.type if body.optimizer_config else None,
    )


def optim_step(body: wire.OptimStep) -> rq.OptimStep:
    """Build the request. Raises InvalidRequest for `optimizer_params`; use `adam_params`."""
    if body.optimizer_params is not None:
        raise InvalidRequest(
            f"optimizer_params of type {body.optimizer_params.get('type')!r} is refused; choose "
            f"{_OPTIMIZERS} with optimizer_config of create_model, and give the settings of every "
            "step in adam_params (beta1 is the momentum of muon)"
        )
    return rq.OptimStep(body.model_id, AdamParams(**body.adam_params.model_dump()), body.seq_id)


def save_weights(body: wire.SaveWeights) -> rq.SaveWeights:
    """Build the request. `path` of the body is the name of the checkpoint."""
    return rq.SaveWeights(
        model_id=body.model_id,
        name=body.path,
        overwrite=body.overwrite,
        seq_id=body.seq_id,
        user_metadata=_strings(body.user_metadata),
        ttl_seconds=body.ttl_seconds,
    )


def save_external(body: wire.SaveExternal) -> rq.SaveExternal:
    """Build the request. Its recipients are checked with the rest."""
    return rq.SaveExternal(
        model_id=body.model_id,
        name=body.path,
        seq_id=body.seq_id,
        ttl_seconds=body.ttl_seconds,
        recipients=tuple(body.age_encryption_recipients),
    )


def save_for_sampler(body: wire.SaveForSampler) -> rq.SaveForSampler:
    """With a path, save under that name; otherwise for a new sampling session."""
    if body.kind != "snapshot":
        raise InvalidRequest(f"kind {body.kind!r} is not served; use snapshot")
    if (body.path is None) == (body.sampling_session_seq_id is None):
        raise InvalidRequest("give either path (a name) or sampling_session_seq_id")
    if body.path is not None:
        metadata = _strings(body.user_metadata)
        return rq.SaveForSampler(
            model_id=body.model_id,
            name=body.path,
            seq_id=body.seq_id,
            user_metadata=metadata,
            ttl_seconds=body.ttl_seconds,
        )
    for name in ("ttl_seconds", "user_metadata"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name} is for a checkpoint with a name; give path, or leave {name} out"
            )
    assert body.sampling_session_seq_id is not None
    session_id = body.model_id.split(":train:")[0]
    sampler_id = sampler_id_for(session_id, body.sampling_session_seq_id)
    return rq.SaveForSampler(model_id=body.model_id, sampler_id=sampler_id, seq_id=body.seq_id)


def sample(
    body: wire.Asample,
    sampler_id: str,
    default_max_tokens: int,
    limit_bytes: int,
    reader: PictureReader,
    tempered: bool = False,
    processed: bool = False,
) -> rq.Sample:
    """Build the request. `tempered` and `processed` are the defaults of the body's options."""
    _refuse_both(body, "sampling_session_id", "model_path")
    _refuse_both(body, "sampling_session_id", "base_model")
    if body.record_stability_info:
        raise InvalidRequest(
            "record_stability_info is for the loss stable_reinforce, which is not served; "
            "use importance_sampling"
        )
    prompt, pictures = codec.prompt_from_chunks(body.prompt.chunks, reader)
    p, targets = body.sampling_params, body.target_prompt_logprobs
    stop = (p.stop,) if isinstance(p.stop, str) else None if p.stop is None else tuple(p.stop)
    params = rq.SamplingParams(
        max_tokens=p.max_tokens
        if p.max_tokens is not None
        else max(1, default_max_tokens - len(prompt)),
        num_samples=body.num_samples,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        seed=p.seed,
        stop=stop,  # type: ignore[arg-type]
        prompt_logprobs=body.prompt_logprobs,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        prompt_targets=None
        if targets is None
        else codec.prompt_targets_from_json(targets, limit_bytes),
        prompt_alternatives=body.prompt_alt_tokens_k,
        tempered_logprobs=tempered if body.tempered_logprobs is None else body.tempered_logprobs,
        processed_logprobs=processed
        if body.processed_logprobs is None
        else body.processed_logprobs,
    )
    # Without a sampling session there are no sequence numbers that identify a retry.
    return rq.Sample(
        sampler_id=sampler_id,
        prompt=prompt,
        pictures=pictures,
        params=params,
        seq_id=body.seq_id if body.sampling_session_id else None,
    )


def result_body(result: rs.Result, accept: str) -> tuple[bytes, str] | dict[str, Any]:
    """Return (bytes, content type) for protobuf results, else the JSON object."""
    proto = PROTOBUF in accept
    match result:
        case rs.Failure():
            return {"error": result.message, "category": result.category}
        case rs.LossOutput():
            return (
                (answers.loss_output_to_proto(result), PROTOBUF)
                if proto
                else answers.loss_output_to_json(result)
            )
        case rs.SampleOutput():
            return (
                (answers.sample_to_proto(result), PROTOBUF)
                if proto
                else answers.sample_to_json(result)
            )
        case rs.ModelCreated():
            return {"type": "create_model", "model_id": result.model_id}
        case rs.StepDone():
            return {"type": "optim_step", "metrics": result.metrics}
        case rs.Saved(num_bytes=int(size)):
            return {"type": "save_weights_external", "path": result.path, "size_bytes": size}
        case rs.Saved():
            return {"type": "save_weights", "path": result.path}
        case rs.SamplerSaved(sampler_id=None):
            return {"type": "save_weights_for_sampler", "path": result.path}
        case rs.SamplerSaved():
            return {"type": "save_weights_for_sampler", "sampling_session_id": result.sampler_id}
        case rs.Loaded():
            return {"type": "load_weights", "path": result.path, "model_id": result.model_id}
        case rs.Unloaded():
            return {"type": "unload_model", "model_id": result.model_id}


def check_copy(body: wire.CopyWeights) -> None:
    """Raise InvalidRequest when a copy has two targets."""
    _refuse_both(body, "session_id", "destination_project_id")
    _refuse_both(body, "model_seq_id", "destination_project_id")


def _refuse_both(body: wire.Body, name: str, other: str) -> None:
    if getattr(body, name) is not None and getattr(body, other) is not None:
        raise InvalidRequest(f"{name} and {other} are both given; leave one of them out")


def _strings(metadata: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in metadata.items()}
