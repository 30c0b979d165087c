"""Real vLLM on a CPU at its start: which models it computes or refuses, and which adapters."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
)

from skyrl_actors.engines import engine_args, weight_parts
from skyrl_actors.engines.check_prompt import fixed_prompt
from skyrl_actors.engines.interface import BASE_VERSION, EngineSpec
from skyrl_actors.engines.logprob_check import SCORING
from skyrl_actors.engines.vllm_engine import VllmEngine
from skyrl_actors.messages.errors import ConfigError, InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.transfer.folders import full_manifests

SIZE = {
    "vocab_size": 128,
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert os.environ["OMP_NUM_THREADS"] == "1"


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder


@asynccontextmanager
async def engine_for(
    base: Path, dtype: str = "float32", kv_cache_bytes: int = 32 * 2**20, **options: Any
) -> AsyncGenerator[VllmEngine]:
    spec = EngineSpec(
        name="engine[0]",
        base_folder=str(base),
        device="cpu",
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_bytes=kv_cache_bytes,
        max_loras=2,
        max_lora_rank=8,
        max_adapters=4,
        enforce_eager=True,
        call_timeout_s=60.0,
        **options,
    )
    engine = VllmEngine(spec)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def continued(base: Path, text: tuple[int, ...]) -> tuple[int, ...]:
    """Return the opening of the text with transformers' greedy continuation of the same length."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = list(fixed_prompt(128, 128))
    while len(ids) < len(text):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids)


def head_adapter(base: Path, folder: Path) -> WeightManifest:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"])).save_pretrained(
        folder
    )
    return WeightManifest(version="m@1", kind="lora", path=str(folder), num_bytes=1)


@pytest.mark.slow
@pytest.mark.parametrize("adapts_head", [True, False])
async def test_an_engine_reports_whether_its_model_takes_an_adapter_on_the_head(
    adapts_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = saved(Qwen3Config(**SIZE | {"tie_word_embeddings": True}), tmp_path / "base")
    if not adapts_head:
        layers = [layer for layer in engine_args.LORA_LAYERS if layer != "lm_head"]
        monkeypatch.setattr(engine_args, "LORA_LAYERS", layers)
    adapter = head_adapter(base, tmp_path / "adapter")
    prompt = fixed_prompt(128, 128)
    async with engine_for(base) as engine:
        status = await engine.status()
        assert status.adapts_head == adapts_head
        assert status.check_prompt == continued(base, status.check_prompt)
        if adapts_head:
            assert (
                await engine.sample("r", prompt, SCORING, adapter, "m@1")
            ).prompt_logprobs is not None
        else:
            with pytest.raises(InvalidRequest, match=r"does not compute 1 part\(s\).*lm_head"):
                await engine.sample("r", prompt, SCORING, adapter, "m@1")
        (base_part,) = full_manifests(base, BASE_VERSION)
        fewer = tuple(
            entry for entry in base_part.tensors if "layers.1.mlp.down_proj" not in entry.name
        )
        with pytest.raises(
            Exception, match=r"left out 1 layer\(s\): model\.layers\.1\.mlp\.down_proj"
        ):
            await engine.load_full("m@2", (replace(base_part, tensors=fewer),))
        assert engine.dead.is_set()


@pytest.mark.slow
async def test_a_head_size_that_vllm_does_not_compute_is_refused_at_the_start(tmp_path: Path):
    base = saved(Qwen3Config(**SIZE | {"head_dim": 16}), tmp_path / "base")
    why = r"computing Qwen3ForCausalLM fails in vLLM .*Unsupported CPU attention .*head_dim=16"
    with pytest.raises(ConfigError, match=why):
        async with engine_for(base):
            pass


@pytest.mark.slow
async def test_a_live_update_that_vllm_does_not_take_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without one tensor, the update of the start leaves out a layer."""
    base = saved(Qwen3Config(**SIZE), tmp_path / "base")

    def without_one(folder: Path, version: str) -> tuple[WeightManifest, ...]:
        (whole,) = full_manifests(folder, version)
        kept = tuple(entry for entry in whole.tensors if "1.mlp.down_proj" not in entry.name)
        return (replace(whole, tensors=kept),)

    monkeypatch.setattr(weight_parts, "full_manifests", without_one)
    refused = r"a live weight update of Qwen3ForCausalLM fails in vLLM .*left out 1 layer\(s\)"
    with pytest.raises(ConfigError, match=refused):
        async with engine_for(base):
            pass
    async with engine_for(base, takes_full_weights=False) as engine:
        assert (await engine.status()).loaded_version == BASE_VERSION


@pytest.mark.slow
async def test_a_late_sample_fails_alone_because_vllm_computes(tmp_path: Path):
    base = saved(Qwen3Config(**SIZE | {"tie_word_embeddings": True}), tmp_path / "base")
    how = SamplingParams(max_tokens=100, seed=1, stop=())
    async with engine_for(base) as engine:
        before = engine._deadlines.steps
        await engine.sample("r1", (1, 2), how, None, BASE_VERSION)
        assert engine._deadlines.steps - before >= 100
        engine._deadlines._seconds = 0.05
        with pytest.raises(InternalError, match="r2 did not finish") as found:
            await engine.sample("r2", (1, 2), how, None, BASE_VERSION)
        assert not isinstance(found.value, StateLost) and not engine.dead.is_set()
        engine._deadlines._seconds = 60.0
        (one,) = (await engine.sample("r3", (1, 2), how, None, BASE_VERSION)).sequences
        assert len(one.tokens) == 100
