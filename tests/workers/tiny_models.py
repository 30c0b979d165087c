"""Small random models of many architectures for tests, as folders in Hugging Face format."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

SIZE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZE, tie_word_embeddings=True),
    # Tensors of more than 100,000 weights, which ZeRO stage 3 does not keep gathered.
    "qwen3-wide": Qwen3Config(
        **{**SIZE, "vocab_size": 640, "hidden_size": 192, "intermediate_size": 640},
        tie_word_embeddings=True,
    ),
    "qwen3-untied": Qwen3Config(**SIZE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZE, sliding_window=8, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(
        **SIZE,
        sliding_window=8,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": Phi3Config(**SIZE, sliding_window=8, tie_word_embeddings=False),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        tie_word_embeddings=False,
    ),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Models that pack wrongly.
NOT_ISOLATED: dict[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(
        **SIZE,
        **EXPERTS,
        **DELTA_NET,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": Lfm2Config(**SIZE, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "nemotron-h": NemotronHConfig(
        **SIZE | {"num_hidden_layers": 4},
        hybrid_override_pattern="M*-M",  # pyright: ignore[reportCallIssue]  one of its kwargs
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
    ),
    "falcon-h1": FalconH1Config(**SIZE, **MAMBA),
    "llama4": Llama4TextConfig(
        **SIZE,
        attention_chunk_size=8192,
        num_local_experts=4,
        intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "seed-oss": SeedOssConfig(**SIZE),  # its dropout is not a layer
    "gpt-oss": GptOssConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2, sliding_window=128),
    "deepseek-v3": DeepseekV3Config(**SIZE, **MLA),
    "mamba2": Mamba2Config(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
    ),
}
# Models with windows and experts, for rows that are shorter than the windows.
LONG_WINDOWS: dict[str, PreTrainedConfig] = {
    "mistral-4096": MistralConfig(**SIZE, sliding_window=4096),
    "gemma3-512": Gemma3TextConfig(
        **SIZE,
        sliding_window=512,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2-moe": Qwen2MoeConfig(**SIZE, **EXPERTS, shared_expert_intermediate_size=32),
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}
CONFIGS = (
    MODELS
    | NOT_ISOLATED
    | LONG_WINDOWS
    | {
        "phi3-longrope": Phi3Config(
            **SIZE | {"hidden_size": 64},
            rope_parameters=LONG_ROPE,
            original_max_position_embeddings=32,
        ),
    }
)


def make(name: str, folder: Path) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        # Larger weights: gradients of the usual tiny ones are lost in rounding.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder
