"""Random models of many architectures, small enough for tests, as folders in Hugging Face format."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZE = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZE, tie_word_embeddings=True),
    # Tensors of more than 100,000 weights, which ZeRO stage 3 does not keep gathered.
    "qwen3-wide": Qwen3Config(**{**SIZE, "vocab_size": 640, "hidden_size": 192, "intermediate_size": 640}, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**SIZE, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZE, sliding_window=8, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(**SIZE, sliding_window=8, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False,
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # weights that matter: gradients of the usual tiny ones are lost in rounding
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder
