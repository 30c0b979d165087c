"""Real vLLM on a CPU agrees with the trainer: many families, and adapters on every layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    Cohere2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    Lfm2Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.engines.logprob_check import SCORING
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.transfer.folders import manifests
from tests.engines import test_vllm_start
from tests.engines.test_vllm_start import EXPERTS, engine_for, environment, saved
from tests.workers import quantized_models
from tests.workers.family_runs import disturb
from tests.workers.quantized_models import copies
from tests.workers.strategy_runs import run, worker_of

__all__ = ["environment"]  # a fixture
SIZE = test_vllm_start.SIZE | {"vocab_size": 512}
TIED = {"tie_word_embeddings": True}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3-moe": Qwen3MoeConfig(**SIZE, **EXPERTS),
    "qwen2-moe": Qwen2MoeConfig(**SIZE, **EXPERTS, shared_expert_intermediate_size=32),
    "gpt-oss": GptOssConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "glm4-moe": Glm4MoeConfig(
        **SIZE,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    # latent attention; vLLM also reads fields that only published files have
    "deepseek-v3": DeepseekV3Config(
        **SIZE | {"num_key_value_heads": SIZE["num_attention_heads"], "head_dim": 64},
        kv_lora_rank=512,
        q_lora_rank=32,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",  # pyright: ignore[reportCallIssue]  one of its kwargs
        scoring_func="sigmoid",  # pyright: ignore[reportCallIssue]
    ),
    "mixtral": MixtralConfig(**SIZE, num_local_experts=4),
    "qwen2": Qwen2Config(**SIZE),
    "qwen2-tied": Qwen2Config(**SIZE | TIED),
    "mistral": MistralConfig(**SIZE),
    "glm4": Glm4Config(**SIZE),  # one matrix for gate and up in its files
    # more words than vLLM takes for an adapter on the output layer
    "gemma3": Gemma3TextConfig(**SIZE | TIED | {"vocab_size": 262_144}),
    # the class has no output layer in vLLM
    "gemma2": Gemma2Config(**SIZE | TIED, sliding_window=8, final_logit_softcapping=3.0),
    "cohere2": Cohere2Config(**SIZE | TIED, logit_scale=0.25),
    "nemotron-h": NemotronHConfig(
        **SIZE | {"num_hidden_layers": 4},
        hybrid_override_pattern="ME*-",  # pyright: ignore[reportCallIssue]  one of its kwargs
        **MAMBA,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "falcon-h1": FalconH1Config(
        **SIZE,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        lm_head_multiplier=0.5,
    ),
    "lfm2": Lfm2Config(  # vLLM also reads sizes that only published files have
        **SIZE | {"tie_word_embeddings": True, "block_dim": 64, "conv_dim": 64},
        layer_types=["conv", "full_attention"],
        block_multiple_of=8,
    ),
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GATED_DELTA: dict[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(**SIZE, **EXPERTS, **LINEAR, shared_expert_intermediate_size=32),
    "qwen3.5": Qwen3_5TextConfig(**SIZE, **LINEAR),
}
PROMPT = tuple(np.random.default_rng(3).integers(2, 512, 40).tolist())


def trained(base: Path, name: str, lora: LoraSpec | None) -> tuple[Any, np.ndarray]:
    """Return a worker with a random model, and the model's logprobs of the prompt."""
    worker = worker_of(0, 1, 0, str(base), ReplicaStrategy(), budget=128)
    worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=lora, seed=len(name)))
    disturb(worker, name)
    return worker, scored(worker, name)


def scored(worker: Any, name: str) -> np.ndarray:
    tokens = np.asarray(PROMPT, np.int32)
    example = Example(tokens[:-1], {TARGETS: tokens[1:], "weights": np.ones(39, np.float32)})
    (output,) = run(worker, [(name, columns_from([example]), None)], forward_only=True)
    return output.values


def saved_model(worker: Any, name: str, folder: Path) -> tuple[WeightManifest, ...]:
    worker.save_checkpoint(name, str(folder), "weights", "r1")
    return manifests(folder, f"{name}@1")


@pytest.mark.slow
async def test_adapters_with_own_factors_for_each_expert(tmp_path: Path, random_base: Path):
    base = saved(CONFIGS["mixtral"], tmp_path / "base")
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, values = trained(base, "a", LoraSpec(rank=4, expert_layout="per_expert"))
    (manifest,) = saved_model(worker, "a", tmp_path / "a")
    layout: Any = {"takes_full_weights": False, "expert_layout": "per_expert"}
    async with engine_for(base, **layout) as engine:
        found = await engine.sample("r", PROMPT, SCORING, manifest, manifest.version)
        assert found.prompt_logprobs is not None
        np.testing.assert_allclose(found.prompt_logprobs[1:], values, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED_DELTA)
async def test_adapters_on_gated_delta_layers(name: str, tmp_path: Path, random_base: Path):
    """The layers' kernels on a CPU take bfloat16 and heads of 128 alone."""
    base = saved(GATED_DELTA[name], tmp_path / "base")
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, values = trained(base, "a", LoraSpec(rank=4, train_mlp=False, train_unembed=False))
    worker.create_model(ModelSpec(model_id="b", base_model="tiny", lora=LoraSpec(rank=4), seed=5))
    (manifest,) = saved_model(worker, "a", tmp_path / "a")
    async with engine_for(base, dtype="bfloat16", takes_full_weights=False) as engine:
        found = await engine.sample("r", PROMPT, SCORING, manifest, manifest.version)
        assert found.prompt_logprobs is not None
        effect = np.abs(values - scored(worker, "b")).mean()  # b is the base model still
        assert np.abs(found.prompt_logprobs[1:] - values).mean() < min(0.05, effect / 10)


@pytest.mark.slow
async def test_adapters_on_quantized_experts(tmp_path: Path, random_base: Path):
    """The engine keeps MXFP4 weights, and the trainer computes with the numbers they stand for."""
    config = GptOssConfig(
        **SIZE | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2
    )
    base, _ = copies(saved(config, tmp_path / "made"), "mxfp4", tmp_path)
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, values = trained(base, "a", LoraSpec(rank=4))
    worker.create_model(ModelSpec(model_id="b", base_model="tiny", lora=LoraSpec(rank=4), seed=5))
    (manifest,) = saved_model(worker, "a", tmp_path / "a")
    async with engine_for(base, takes_full_weights=False) as engine:
        alone = scored(worker, "b")  # b is the base model still
        for adapter, wanted in ((manifest, values), (None, alone)):
            version = adapter.version if adapter else "base"
            found = await engine.sample(f"r{version}", PROMPT, SCORING, adapter, version)
            assert found.prompt_logprobs is not None
            np.testing.assert_allclose(found.prompt_logprobs[1:], wanted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="vLLM computes FP8 only on CPUs with AMX",
)
async def test_adapters_on_fp8_weights(
    tmp_path: Path, random_base: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM computes them in bfloat16 and quantizes activations too, so only the bound is wider."""
    monkeypatch.setattr(quantized_models, "FP8_BLOCK", (128, 128))
    base, _ = copies(saved(Qwen3Config(**SIZE), tmp_path / "made"), "fp8", tmp_path)
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, values = trained(base, "a", LoraSpec(rank=4))
    worker.create_model(ModelSpec(model_id="b", base_model="tiny", lora=LoraSpec(rank=4), seed=5))
    effect = np.abs(values - scored(worker, "b")).mean()  # b is the base model still
    (manifest,) = saved_model(worker, "a", tmp_path / "a")
    async with engine_for(base, dtype="bfloat16", takes_full_weights=False) as engine:
        found = await engine.sample("r", PROMPT, SCORING, manifest, manifest.version)
        assert found.prompt_logprobs is not None
        assert np.abs(found.prompt_logprobs[1:] - values).mean() < min(0.05, effect / 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
async def test_adapters_and_updates_of_a_mixture(name: str, tmp_path: Path, random_base: Path):
    base = saved(CONFIGS[name], tmp_path / "base")
    AutoTokenizer.from_pretrained(random_base).save_pretrained(base)
    worker, first = trained(base, "a", LoraSpec(rank=4))
    worker.create_model(ModelSpec(model_id="bb", base_model="tiny", lora=LoraSpec(rank=2), seed=5))
    disturb(worker, "bb")
    adapters = {
        key: (saved_model(worker, key, tmp_path / key)[0], values)
        for key, values in (("a", first), ("bb", scored(worker, "bb")))
    }
    full, changed = trained(base, "full", None)
    weights = saved_model(full, "full", tmp_path / "full")
    async with engine_for(base) as engine:
        assert (await engine.status()).adapts_head
        for key, (manifest, values) in adapters.items():
            found = await engine.sample(f"r{key}", PROMPT, SCORING, manifest, manifest.version)
            assert found.prompt_logprobs is not None
            np.testing.assert_allclose(found.prompt_logprobs[1:], values, atol=1e-4)
        await engine.load_full("full@1", weights)
        found = await engine.sample("rf", PROMPT, SCORING, None, "full@1")
        assert found.prompt_logprobs is not None
        np.testing.assert_allclose(found.prompt_logprobs[1:], changed, atol=1e-4)
