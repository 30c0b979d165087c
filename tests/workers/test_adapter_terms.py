"""An adapter has as many parameters as one of the Tinker service.

The numbers a rank are those that tinker-cookbook 0.6.1 publishes
(`hyperparam_utils.get_lora_param_count`); the sizes are those of the models' config.json.
"""

from dataclasses import dataclass
from math import prod

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyrl_actors.messages.model import LoraSpec
from skyrl_actors.workers.adapter_terms import Switch, chosen, terms_of
from skyrl_actors.workers.coverage import check_covered

THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]


def qwen3_5_moe() -> PreTrainedConfig:
    return Qwen3_5MoeTextConfig(
        vocab_size=248_320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=256,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        layer_types=THREE_TO_ONE * 10,
    )


def qwen3_5() -> PreTrainedConfig:
    return Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=THREE_TO_ONE * 8,
    )


def nemotron_nano() -> PreTrainedConfig:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    return NemotronHConfig(
        vocab_size=131_072,
        hidden_size=2688,
        num_hidden_layers=len(pattern),  # pyright: ignore[reportCallIssue]
        hybrid_override_pattern=pattern,  # pyright: ignore[reportCallIssue]  one of its kwargs
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        n_routed_experts=128,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_shared_experts=1,
    )


def qwen3_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # pyright: ignore[reportCallIssue]
        num_experts=128,
        moe_intermediate_size=768,
    )


def qwen3_8b() -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )


def llama_1b() -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Published:
    config: PreTrainedConfig
    mlp: int
    attn: int
    unembed: int


PUBLISHED = {
    "Qwen/Qwen3-30B-A3B": Published(qwen3_moe(), 14_450_688, 835_584, 153_984),
    # The defaults of transformers' config are those of the 20B model, but for its layers.
    "openai/gpt-oss-20b": Published(
        GptOssConfig(num_hidden_layers=24, num_local_experts=32), 6_842_880, 497_664, 203_968
    ),
    "openai/gpt-oss-120b": Published(
        GptOssConfig(num_hidden_layers=36, num_local_experts=128), 40_124_160, 746_496, 203_968
    ),
    "deepseek-ai/DeepSeek-V3.1": Published(DeepseekV3Config(), 94_307_328, 2_440_000, 136_448),
    "Qwen/Qwen3.5-35B-A3B": Published(qwen3_5_moe(), 16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.5-4B": Published(qwen3_5(), 1_130_496, 897_024, 250_880),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Published(
        nemotron_nano(), 11_346_176, 584_832, 133_760
    ),
    "Qwen/Qwen3-8B": Published(qwen3_8b(), 1_769_472, 958_464, 156_032),
    "meta-llama/Llama-3.2-1B": Published(llama_1b(), 491_520, 212_992, 130_304),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_adapter_has_as_many_parameters_as_the_hosted_one(name: str):
    published = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published.config)
    terms = terms_of(model)
    check_covered(LoraSpec(rank=8), model, terms)

    def parameters(switch: Switch) -> int:
        off = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False)
        spec = LoraSpec(rank=8, **off | {switch: True})
        shapes = [s for term in chosen(terms, spec) for s in term.shapes(8, "shared_outer")]
        return sum(prod(shape) for shape in shapes)

    assert parameters("train_mlp") == 8 * published.mlp
    assert parameters("train_attn") == 8 * published.attn
    assert parameters("train_unembed") == 8 * published.unembed
