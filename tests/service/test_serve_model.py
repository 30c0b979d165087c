"""`serve FOLDER` without a config file: models of some families with random weights."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    NemotronHConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.service.served_folder import serve_and_train

SIZE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on CPUs takes multiples of 32
    "max_position_embeddings": 2048,
}


def model_in(folder: Path, family: str, base: Path) -> Path:
    """Save a model with random weights, and the tiny model's tokenizer."""
    configs = {
        "llama": LlamaConfig(**SIZE),
        "qwen3": Qwen3Config(**SIZE),
        "qwen3-moe": Qwen3MoeConfig(
            **SIZE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
        ),
        "nemotron-h": NemotronHConfig(
            **SIZE | {"num_hidden_layers": 4},
            hybrid_override_pattern="ME*-",  # pyright: ignore[reportCallIssue]  one of its kwargs
            mamba_num_heads=8,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=2,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=64,
        ),
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configs[family]).save_pretrained(folder / family)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / family)
    return folder / family


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "nemotron-h"])
def test_serve_takes_a_folder(family: str, tmp_path: Path, random_base: Path):
    serve_and_train(model_in(tmp_path, family, random_base))
