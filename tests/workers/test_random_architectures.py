"""Random architectures: rows of a packed pass equal each row alone, by transformers.

Layers of different kinds, numbers of heads, windows, soft caps, experts and states are drawn.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Lfm2MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from skyrl_actors.workers import isolation
from skyrl_actors.workers.base_model import BaseModel


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    shared = draw(st.sampled_from([1, 2, 3]))  # heads of queries for each of keys
    kv_heads = draw(st.sampled_from([1, 2]))
    return {
        "vocab_size": 96,
        "hidden_size": draw(st.sampled_from([24, 48])),
        "intermediate_size": draw(st.sampled_from([24, 64])),
        "num_attention_heads": kv_heads * shared,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16])),
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def experts(draw: st.DrawFn, name: str = "num_experts") -> dict[str, Any]:
    count = draw(st.sampled_from([2, 5]))
    return {
        name: count,
        "num_experts_per_tok": draw(st.integers(1, count)),
        "moe_intermediate_size": draw(st.sampled_from([8, 24])),
    }


@st.composite
def kinds(draw: st.DrawFn, first: str, second: str = "full_attention") -> dict[str, Any]:
    layers = draw(st.lists(st.sampled_from([first, second]), min_size=1, max_size=3))
    return {"layer_types": [*layers, second], "num_hidden_layers": len(layers) + 1}


@st.composite
def gated_delta(draw: st.DrawFn) -> PreTrainedConfig:
    key_heads = draw(st.sampled_from([1, 2]))
    return Qwen3NextConfig(
        **draw(sizes()),
        **draw(experts()),
        **draw(kinds("linear_attention")),
        shared_expert_intermediate_size=draw(st.sampled_from([8, 16])),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw(st.sampled_from([1, 2])),
        linear_key_head_dim=draw(st.sampled_from([8, 16])),
        linear_value_head_dim=draw(st.sampled_from([8, 16])),
        linear_conv_kernel_dim=draw(st.integers(2, 4)),
    )


@st.composite
def mamba(draw: st.DrawFn) -> PreTrainedConfig:
    groups = draw(st.sampled_from([1, 2]))
    pattern = draw(st.text("ME*-", min_size=1, max_size=4)) + "*"
    fields = draw(sizes()) | draw(experts("n_routed_experts"))
    fields |= {"num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}
    return NemotronHConfig(
        **fields,
        mamba_num_heads=groups * draw(st.sampled_from([1, 2])),
        mamba_head_dim=draw(st.sampled_from([8, 16])),
        ssm_state_size=draw(st.sampled_from([4, 8])),
        n_groups=groups,
        moe_shared_expert_intermediate_size=16,
    )


@st.composite
def convolution(draw: st.DrawFn) -> PreTrainedConfig:
    return Lfm2MoeConfig(
        **draw(sizes()),
        **draw(experts()),
        **draw(kinds("conv")),
        num_dense_layers=draw(st.integers(0, 2)),
        conv_L_cache=draw(st.integers(2, 4)),
    )


@st.composite
def windows(draw: st.DrawFn) -> PreTrainedConfig:
    return Gemma2Config(
        **draw(sizes()),
        **draw(kinds("sliding_attention")),
        sliding_window=draw(st.integers(2, 16)),
        query_pre_attn_scalar=16,
        final_logit_softcapping=draw(st.sampled_from([None, 3.0])),
        attn_logit_softcapping=draw(st.sampled_from([None, 5.0])),
    )


@st.composite
def sinks(draw: st.DrawFn) -> PreTrainedConfig:
    routed = draw(experts("num_local_experts"))
    routed.pop("moe_intermediate_size")
    return GptOssConfig(
        **draw(sizes()), **routed, **draw(kinds("sliding_attention")), sliding_window=4
    )


@st.composite
def mixture(draw: st.DrawFn) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **draw(sizes()),
        **draw(experts()),
        num_hidden_layers=2,
        mlp_only_layers=draw(st.sampled_from([[], [0], [1]])),
        norm_topk_prob=draw(st.booleans()),
    )


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (mamba, convolution, mixture)]


@pytest.mark.parametrize("kind", [gated_delta, windows, sinks, *SLOW])
def test_packed_rows_equal_each_row_alone(kind: Any):
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(kind(), st.sampled_from([1.0, 2.0]), st.integers(0, 9))
    def check(config: PreTrainedConfig, scale: float, seed: int) -> None:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(scale)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(Path(folder))
            found = isolation.differences(BaseModel(folder, torch.float32, torch.device("cpu")))
        assert not isolation.faults_in(found, isolation.ALLOWED[torch.float32]), config
        assert found.logprobs < 1e-5 and found.gradients < 1e-4, config

    check()
