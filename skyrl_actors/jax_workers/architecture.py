"""One description of the decoders that JAX computes: the families of Llama, Qwen, Mistral, Gemma 3.

A family is a set of values of these fields. A model that needs anything else is refused by name,
before weights are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skyrl_actors.messages.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
NO_WINDOW = 2**30
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: the angle of one position in each pair of features, and a factor."""

    frequencies: tuple[float, ...]  # [D / 2]
    factor: float = 1.0  # of sines and cosines


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder: embedding, layers of attention and MLP, norm, output layer."""

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    activation: Activation
    query_scale: float
    tied: bool
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]  # by layer
    window_of: tuple[int, ...]  # by layer: how far back a query looks, NO_WINDOW for all
    qk_norm: bool = False
    norm_offset: float = 0.0  # what is added to the weights of norms
    post_norms: bool = False  # norms of the results of attention and MLP
    embed_scale: float = 1.0
    no_gradient: int | None = None  # the token whose embedding gets none, as in torch
    experts: int = 0  # routed experts of each layer, of width `mlp`; 0: a dense MLP
    experts_of_token: int = 0
    normed_scores: bool = False  # those of a token's experts add up to 1


def _plain(config: Any) -> dict[str, Any]:
    return {}


def _qwen3(config: Any) -> dict[str, Any]:
    return {"qk_norm": True}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ConfigError(
            "strategy jax computes mixtures whose layers all have experts, and this one has dense "
            "layers (mlp_only_layers, decoder_sparse_step); use another strategy"
        )
    return {
        "qk_norm": True,
        "mlp": int(config.moe_intermediate_size),
        "experts": int(config.num_experts),
        "experts_of_token": int(config.num_experts_per_tok),
        "normed_scores": bool(config.norm_topk_prob),
    }


def _gemma3(config: Any) -> dict[str, Any]:
    if config.final_logit_softcapping or config.attn_logit_softcapping:
        raise ConfigError("strategy jax does not compute soft caps; use another strategy")
    return {
        "qk_norm": True,
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": float(config.hidden_size) ** 0.5,
        "query_scale": float(config.query_pre_attn_scalar) ** -0.5,
    }


FAMILIES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _plain,
    "qwen2": _plain,
    "mistral": _plain,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
}


def architecture_of(folder: str) -> Architecture:
    """Return the description of a base model. Raises ConfigError for one that has none."""
    config: Any = AutoConfig.from_pretrained(folder)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"strategy jax cannot train {config.model_type}: it knows {', '.join(FAMILIES)}; "
            "use strategy replica, fsdp2 or deepspeed"
        )
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"strategy jax does not compute the activation {activation}; "
            f"it knows {', '.join(ACTIVATIONS)}"
        )
    head_dim = int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    kinds = _kinds_of_layers(config)
    ropes = {kind: _rope(config, kind, head_dim) for kind in dict.fromkeys(kinds)}
    window = int(getattr(config, "sliding_window", None) or NO_WINDOW)
    fields = {
        "name": config.model_type,
        "layers": int(config.num_hidden_layers),
        "hidden": int(config.hidden_size),
        "mlp": int(config.intermediate_size),
        "heads": int(config.num_attention_heads),
        "kv_heads": int(config.num_key_value_heads),
        "head_dim": head_dim,
        "vocab": int(config.vocab_size),
        "eps": float(config.rms_norm_eps),
        "activation": ACTIVATIONS[activation],
        "query_scale": head_dim**-0.5,
        "no_gradient": config.pad_token_id,
        "tied": bool(config.tie_word_embeddings),
        "ropes": tuple(ropes.values()),
        "rope_of": tuple([*ropes].index(kind) for kind in kinds),
        "window_of": tuple(window if kind == SLIDING else NO_WINDOW for kind in kinds),
    }
    return Architecture(**fields | FAMILIES[config.model_type](config))


def _kinds_of_layers(config: Any) -> list[str]:
    """Return the kind of attention of each layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        always = config.model_type == "mistral" and config.sliding_window
        kinds = [SLIDING if always else FULL] * int(config.num_hidden_layers)
    if odd := {*kinds} - {FULL, SLIDING}:
        raise ConfigError(f"strategy jax does not compute layers of kind {odd.pop()}")
    return list(kinds)


def _rope(config: Any, kind: str, head_dim: int) -> Rope:
    parameters: Any = config.rope_parameters
    own: dict[str, Any] = parameters.get(kind, parameters)
    name = own.get("rope_type", "default")
    if name == "default":
        theta = float(own["rope_theta"])
        return Rope(tuple(theta ** (-i / head_dim) for i in range(0, head_dim, 2)))
    if name not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"strategy jax does not compute the rotary embedding {name}")
    layer_type = kind if kind in parameters else None
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu", layer_type=layer_type)
    return Rope(tuple(frequencies.double().tolist()), float(factor))
