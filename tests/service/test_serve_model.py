"""`serve FOLDER` without a config file: models of some families with random weights."""

from pathlib import Path

import pytest
import tinker
import torch
from tinker import types
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    NemotronHConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyrl_actors.config.load import load
from tests.conftest import free_port, run_cli
from tests.service.test_sdk import datum

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
    model_in(tmp_path, family, random_base)
    port = free_port()
    name = f"model-{port}"
    arguments = ("serve", f"./{family}", f"name={name}", f"http.port={port}")
    started = run_cli(*arguments, cwd=tmp_path)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        assert "layout    colocated" in started.stdout
        assert load(tmp_path / f"{family}-service.yaml").http.port == port
        client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-test")
        with client:
            model = client.create_lora_training_client(family, rank=8).result()
            losses = []
            for _ in range(3):
                batch = model.forward_backward([datum(9, seed=1)], "cross_entropy").result()
                model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
                losses.append(batch.metrics["loss:sum"])
            assert losses[2] < losses[1] < losses[0]
            sampler = model.save_weights_and_get_sampling_client().result()
            prompt = types.ModelInput.from_ints([5, 6])
            params = types.SamplingParams(max_tokens=4, seed=1)
            answers = [sampler.sample(prompt, 2, params).result().sequences for _ in range(2)]
            drawn = [[list(one.tokens) for one in sequences] for sequences in answers]
            # A model with random weights may draw the token that ends a sequence.
            assert drawn[0] == drawn[1] and all(1 <= len(tokens) <= 4 for tokens in drawn[0])
    finally:
        stopped = run_cli("stop", "--name", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
