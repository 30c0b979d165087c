"""Tiny random models of many families, in sizes that vLLM computes on a CPU."""

from typing import Any

import transformers
from transformers import PreTrainedConfig

SIZE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PLAIN = {name: value for name, value in SIZE.items() if name != "head_dim"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
WINDOW = {"sliding_window": 8}
TIED = {"tie_word_embeddings": True}
LATENT = {
    "head_dim": 64,  # of the rotary embedding
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
# The class of the family's config, and its fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("LlamaConfig", SIZE),
    "Qwen2.5": ("Qwen2Config", PLAIN),
    "Qwen3": ("Qwen3Config", SIZE),
    "Mistral": ("MistralConfig", SIZE | WINDOW),
    "Phi-4": ("Phi3Config", PLAIN | WINDOW),
    "Gemma 2": ("Gemma2Config", SIZE | WINDOW | TIED | {"final_logit_softcapping": 3.0}),
    "Gemma 3": ("Gemma3TextConfig", SIZE | WINDOW | TIED),
    "OLMo 2": ("Olmo2Config", PLAIN),
    "OLMo 3": ("Olmo3Config", PLAIN | WINDOW),
    "SmolLM3": ("SmolLM3Config", PLAIN),
    "GLM-4": ("Glm4Config", SIZE),
    "EXAONE 4": ("Exaone4Config", PLAIN),
    "Seed-OSS": ("SeedOssConfig", SIZE),
    "Granite 3": ("GraniteConfig", PLAIN | {"logits_scaling": 8.0, "attention_multiplier": 0.1}),
    "Cohere 2": ("Cohere2Config", PLAIN | TIED | {"logit_scale": 0.25}),
    "Qwen2-MoE": ("Qwen2MoeConfig", PLAIN | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Qwen3-MoE": ("Qwen3MoeConfig", SIZE | EXPERTS),
    "Mixtral": ("MixtralConfig", SIZE | {"num_local_experts": 4}),
    "OLMoE": ("OlmoeConfig", PLAIN | {"num_experts": 4, "num_experts_per_tok": 2}),
    "GLM-4.5": ("Glm4MoeConfig", SIZE | ROUTED),
    "gpt-oss": ("GptOssConfig", SIZE | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        SIZE | ROUTED | LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        SIZE
        | MAMBA
        | ROUTED
        | {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "ME*-",
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "Falcon-H1": ("FalconH1Config", SIZE | MAMBA2 | {"mamba_d_ssm": 128, "mamba_d_head": 32}),
    "LFM2": (
        "Lfm2Config",
        SIZE
        | TIED
        | {
            "layer_types": ["conv", "full_attention"],
            "block_multiple_of": 8,
            "block_dim": 64,
            "conv_dim": 64,
        },
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        SIZE | EXPERTS | DELTA_NET | LINEAR | {"shared_expert_intermediate_size": 32},
    ),
    "Qwen3.5": ("Qwen3_5TextConfig", SIZE | DELTA_NET | LINEAR),
}


def config_of(family: str) -> PreTrainedConfig:
    kind, fields = FAMILIES[family]
    return getattr(transformers, kind)(**fields)
