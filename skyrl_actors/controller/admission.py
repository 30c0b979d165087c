"""Check requests when they arrive, before they are queued (pure).

Each check raises InvalidRequest or CapacityError with the value, what is allowed and what to do.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from skyrl_actors import losses
from skyrl_actors.backends.backend import Capabilities
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.losses.custom_graph import graph_of
from skyrl_actors.messages.catalog import LONGEST_TTL_S
from skyrl_actors.messages.columns import TARGETS, Columns
from skyrl_actors.messages.errors import CapacityError, InvalidRequest
from skyrl_actors.messages.model import ROLES, AdamParams, LossCall, ModelSpec
from skyrl_actors.messages.paths import checked_id, owner_of
from skyrl_actors.messages.requests import (
    ForwardBackward,
    Request,
    Sample,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from skyrl_actors.messages.seeds import SEEDS

MIN_TEMPERATURE = 0.0
METADATA_BYTES = 16 * 2**10  # limit for a session, model or checkpoint
LARGEST_INT = 2**62  # limit for numbers that only identify something


def check_seq_id(seq_id: int | None) -> None:
    if seq_id is not None and not 0 <= seq_id <= LARGEST_INT:
        raise InvalidRequest(f"seq_id {seq_id}: use 0 to 2^62")


def check_save(request: Request) -> None:
    """Check the sampler id and lifetime of a save of any kind. Other requests pass."""
    if not isinstance(request, SaveWeights | SaveForSampler | SaveExternal):
        return
    if isinstance(request, SaveForSampler) and request.sampler_id is not None:
        checked_id(request.sampler_id, "sampler id")
    ttl_seconds = request.ttl_seconds
    if ttl_seconds is not None and not 1 <= ttl_seconds <= LONGEST_TTL_S:
        raise InvalidRequest(
            f"ttl_seconds {ttl_seconds}: use 1 to {LONGEST_TTL_S} (100 years), "
            "or leave it out to keep the checkpoint"
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    num_bytes = sum(
        len(text.encode(errors="surrogatepass")) for pair in metadata.items() for text in pair
    )
    if num_bytes > METADATA_BYTES:
        raise InvalidRequest(
            f"user_metadata has {num_bytes} bytes of keys and values; "
            f"at most {METADATA_BYTES} are taken"
        )


def check_count(ids: Iterable[str], new_id: str, limit: int, what: str) -> None:
    """Raise CapacityError when the new id's API key has `limit` ids already."""
    owner = owner_of(new_id)
    if sum(owner_of(known) == owner for known in ids) >= limit:
        raise CapacityError(
            f"{limit} {what} of this API key are alive, the maximum for one key; "
            "finish a session first"
        )


def settled(spec: ModelSpec, capabilities: Capabilities) -> ModelSpec:
    """Return the spec with `train_unembed` filled in, if the client left it open.

    An adapter covers the output layer, except on a policy whose engines cannot sample that.
    """
    if spec.lora is None or spec.lora.train_unembed is not None:
        return spec
    reaches = spec.role == "critic" or capabilities.adapts_head
    return replace(spec, lora=replace(spec.lora, train_unembed=reaches))


def check_spec(spec: ModelSpec, config: ClusterConfig, capabilities: Capabilities) -> None:
    if spec.base_model != capabilities.base_model:
        raise InvalidRequest(
            f"unknown base model {spec.base_model!r}; this service has {capabilities.base_model!r}"
        )
    if not 0 <= spec.seed <= LARGEST_INT:
        raise InvalidRequest(f"seed {spec.seed}: use 0 to 2^62")
    if spec.role not in ROLES:
        raise InvalidRequest(f"model_role {spec.role!r}: use one of {', '.join(ROLES)}")
    if spec.role not in capabilities.roles:
        raise InvalidRequest(f"this service has no {spec.role} group (its config sets it to null)")
    if spec.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        raise InvalidRequest(
            "optimizer adamw8bit needs the package bitsandbytes, "
            "which is not installed in this service; use adamw"
        )
    if spec.optimizer != "adamw" and spec.lora is None:
        group = config.policy if spec.role == "policy" else config.critic
        strategy = group.full_strategy_on(config.placement.device).type if group else "replica"
        if strategy != "replica":
            raise InvalidRequest(
                f"optimizer {spec.optimizer} is for weights that are held whole; "
                f"this service shards full fine-tunes ({strategy}): use adamw or a LoRA"
            )
    if spec.lora and not 1 <= spec.lora.rank <= config.lora.max_rank:
        raise InvalidRequest(
            f"lora rank {spec.lora.rank}: this service takes 1 to {config.lora.max_rank}, "
            "or 0 for a full fine-tune"
        )
    if (
        spec.lora
        and spec.lora.train_unembed
        and spec.role == "policy"
        and not capabilities.adapts_head
    ):
        raise InvalidRequest(
            "train_unembed true: vLLM takes no adapter on the output layer of "
            f"{capabilities.base_model}, so this model could not be sampled; "
            "set train_unembed=False, train_attn and train_mlp are allowed"
        )
    if spec.lora is None and not config.lora.max_full_models:
        raise InvalidRequest(
            "this service takes no full fine-tunes (lora.max_full_models is 0); use a LoRA"
        )
    memory = capabilities.adapters
    if spec.lora and memory.bytes_of(spec.lora.rank) > memory.limit_bytes:
        raise InvalidRequest(
            f"a LoRA of rank {spec.lora.rank} needs "
            f"{memory.bytes_of(spec.lora.rank) / 2**30:.3g} GiB of host memory, and all LoRA "
            f"models together may take {memory.limit_bytes / 2**30:.3g} (lora.max_host_gib); "
            "use a lower rank"
        )


def checked_batch(
    request: ForwardBackward, spec: ModelSpec, config: ClusterConfig, capabilities: Capabilities
) -> LossCall:
    """Check a batch and return its loss call with all options filled in."""
    name = (
        "ppo_critic" if spec.role == "critic" and request.loss.name == "ppo" else request.loss.name
    )
    entry = losses.find(name)
    call = entry.checked(request.loss.config)
    losses.check_inputs(entry, call, spec.role, request.columns, request.forward_only)
    if name == "custom":
        _check_custom(call, request.columns, config)
    columns = request.columns
    if columns.num_rows > config.limits.datums:
        raise InvalidRequest(
            f"{columns.num_rows} datums in one request; at most {config.limits.datums}"
        )
    if columns.num_tokens > config.limits.tokens:
        raise InvalidRequest(
            f"{columns.num_tokens} tokens in one request; "
            f"at most {config.limits.tokens} (limits.tokens)"
        )
    longest = int(columns.lengths.max())
    if longest > capabilities.max_context_tokens:
        raise InvalidRequest(
            f"datum {int(columns.lengths.argmax())} has {longest} tokens; "
            f"{capabilities.base_model} takes {capabilities.max_context_tokens}"
        )
    _check_numbers(columns, capabilities.vocab_size)
    return call


def _check_custom(call: LossCall, columns: Columns, config: ClusterConfig) -> None:
    if not config.http.sdk.custom_loss_server_side:
        raise InvalidRequest(
            "loss custom is off in this service (http.sdk.custom_loss_server_side); "
            "compute such a loss in the SDK"
        )
    graph = graph_of(str(call.config["loss_id"]))
    if missing := [name for name in graph.inputs if name not in columns.fields]:
        raise InvalidRequest(f"custom loss {graph.name} needs loss_fn_inputs {', '.join(missing)}")
    widths = {0} if columns.widths is None else set(columns.widths.tolist())
    if len(widths) > 1 or (0 in widths) != (graph.ranks[0] == 1):
        raise InvalidRequest(
            f"custom loss {graph.name} was declared for inputs of rank {graph.ranks[0]}; "
            "send all datums with that rank and the same K"
        )


def _check_numbers(columns: Columns, vocab_size: int) -> None:
    for what, array in (("model_input", columns.tokens), (TARGETS, columns.fields.get(TARGETS))):
        if array is not None and (int(array.min()) < 0 or int(array.max()) >= vocab_size):
            raise InvalidRequest(f"{what} has a token id outside 0 to {vocab_size - 1}")
    for name, array in columns.fields.items():
        if name != TARGETS and not np.isfinite(array).all():
            raise InvalidRequest(f"{name} has a value that is not finite")


def check_adam(adam: AdamParams) -> None:
    for name, value, good in (
        ("learning_rate", adam.learning_rate, adam.learning_rate >= 0),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1),
        ("eps", adam.eps, adam.eps >= 0),
        ("weight_decay", adam.weight_decay, adam.weight_decay >= 0),
        ("grad_clip_norm", adam.grad_clip_norm, adam.grad_clip_norm >= 0),
    ):
        if not (math.isfinite(value) and good):
            raise InvalidRequest(f"adam_params.{name} is {value}: out of range")


def check_sample(request: Sample, config: ClusterConfig, capabilities: Capabilities) -> None:
    params, length = request.params, len(request.prompt)
    if not length:
        raise InvalidRequest("the prompt is empty")
    if not 1 <= params.num_samples <= config.limits.num_samples:
        raise InvalidRequest(
            f"num_samples {params.num_samples}: use 1 to {config.limits.num_samples}"
        )
    if params.max_tokens < 1 or length + params.max_tokens > capabilities.max_sample_tokens:
        raise InvalidRequest(
            f"prompt of {length} + max_tokens {params.max_tokens} tokens; together they may have "
            f"{capabilities.max_sample_tokens}, and max_tokens at least 1 "
            "(scoring a prompt samples one token too)"
        )
    if min(request.prompt) < 0 or max(request.prompt) >= capabilities.vocab_size:
        raise InvalidRequest(
            f"the prompt has a token id outside 0 to {capabilities.vocab_size - 1}"
        )
    if not (math.isfinite(params.temperature) and params.temperature >= MIN_TEMPERATURE):
        raise InvalidRequest(f"temperature {params.temperature}: use 0 (greedy) or more")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"top_p {params.top_p}: use more than 0, up to 1")
    if params.seed is not None and not 0 <= params.seed <= SEEDS - params.num_samples:
        raise InvalidRequest(f"seed {params.seed}: use 0 to 2^63 - num_samples")
    for stop in params.stop or ():
        if isinstance(stop, int) and not 0 <= stop < capabilities.vocab_size:
            raise InvalidRequest(f"stop token {stop}: use 0 to {capabilities.vocab_size - 1}")
    if params.top_k > LARGEST_INT:
        raise InvalidRequest(
            f"top_k {params.top_k}: use -1 (off) or at most {capabilities.vocab_size}"
        )
    if params.top_k != -1 and params.top_k < 1:
        raise InvalidRequest(f"top_k {params.top_k}: use -1 (off) or at least 1")
    for name, k in (
        ("prompt", params.topk_prompt_logprobs),
        ("sample", params.topk_sample_logprobs),
    ):
        if not 0 <= k <= config.engine.max_logprobs:
            raise InvalidRequest(f"topk_{name}_logprobs {k}: use 0 to {config.engine.max_logprobs}")
    _check_prompt_scores(request, config, capabilities)
    if params.prompt_logprobs_last_n is not None:
        if params.prompt_logprobs_last_n < 1:
            raise InvalidRequest(
                f"prompt_logprobs_last_n {params.prompt_logprobs_last_n}: use at least 1"
            )
        if not (params.prompt_logprobs or params.topk_prompt_logprobs):
            raise InvalidRequest(
                f"prompt_logprobs_last_n {params.prompt_logprobs_last_n} without prompt_logprobs: "
                "set prompt_logprobs or topk_prompt_logprobs too"
            )


def _check_prompt_scores(
    request: Sample, config: ClusterConfig, capabilities: Capabilities
) -> None:
    params, length = request.params, len(request.prompt)
    if not 0 <= params.prompt_alternatives <= config.engine.max_logprobs:
        raise InvalidRequest(
            f"prompt_alt_tokens_k {params.prompt_alternatives}: "
            f"use 0 to {config.engine.max_logprobs}"
        )
    targets = params.prompt_targets
    if targets is not None:
        if targets.shape[0] != length - 1:
            raise InvalidRequest(
                f"target_prompt_logprobs has {targets.shape[0]} rows; "
                f"a prompt of {length} tokens needs {length - 1}"
            )
        if targets.ids and (min(targets.ids) < -1 or max(targets.ids) >= capabilities.vocab_size):
            raise InvalidRequest(
                f"target_prompt_logprobs has an id outside -1 to {capabilities.vocab_size - 1}"
            )
    if params.scores_prompt and length * capabilities.vocab_size > config.engine.max_scored_cells:
        most = config.engine.max_scored_cells // capabilities.vocab_size
        raise InvalidRequest(
            f"target_prompt_logprobs and prompt_alt_tokens_k score the whole vocabulary at each "
            f"position, for prompts of at most {most} tokens (engine.max_scored_cells); "
            f"this prompt has {length}"
        )


def check_fits(spec: ModelSpec, saved: ModelSpec, path: str, with_optimizer: bool) -> None:
    """Raise InvalidRequest when the checkpoint at `path` cannot be loaded into this model.

    A critic can be loaded from a policy: it takes all weights except the output layer.
    """
    if saved.base_model != spec.base_model:
        raise InvalidRequest(
            f"{path} belongs to base model {saved.base_model!r}; "
            f"this service has {spec.base_model!r}"
        )
    if saved.role != spec.role and spec.role == "policy":
        raise InvalidRequest(f"{path} is a critic; a policy cannot be made of it")
    if with_optimizer and saved.role != spec.role:
        raise InvalidRequest(
            f"{path} has a {saved.role}'s optimizer state, this model is a {spec.role}; "
            "load its weights alone"
        )
    if with_optimizer and saved.optimizer != spec.optimizer:
        raise InvalidRequest(
            f"{path} has the state of optimizer {saved.optimizer}, this model uses "
            f"{spec.optimizer}; load its weights alone"
        )
    if saved.lora is None or spec.lora is None:
        if saved.lora is not spec.lora:
            kinds = [
                "a full fine-tune" if lora is None else f"a LoRA of rank {lora.rank}"
                for lora in (saved.lora, spec.lora)
            ]
            raise InvalidRequest(
                f"{path} is {kinds[0]}, this model is {kinds[1]}; create one of the same kind"
            )
        return
    differ = [
        f"{name} is {getattr(saved.lora, name)} there and {getattr(spec.lora, name)} here"
        for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")
        if getattr(saved.lora, name) != getattr(spec.lora, name)
        and not (spec.role == "critic" and name == "train_unembed")
    ]
    if differ:
        raise InvalidRequest(f"{path} cannot be loaded into this adapter: {'; '.join(differ)}")
