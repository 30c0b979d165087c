"""An adapter trains everything that its switches name, or the spec is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.coverage import frozen_weights
from skyrl_actors.workers.interface import WorkerSpec
from skyrl_actors.workers.models import lora_tensors
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.tiny_models import CONFIGS, MODELS, make

ROUTED = "mlp.experts.gate_up_proj, mlp.experts.down_proj"
EVERYTHING = LoraSpec(rank=4)


def network(name: str) -> Network:
    return Network(AutoModelForCausalLM.from_config(CONFIGS[name]), torch.device("cpu"), "keep")


def test_routed_experts_without_adapters_are_refused(tmp_path: Path):
    base = make("qwen2-moe", tmp_path / "base")
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=64,
            collective_timeout_s=60.0,
        )
    )
    worker.setup("127.0.0.1", 0)
    asked = f"train_mlp would leave {ROUTED} of Qwen2MoeForCausalLM frozen: .* set train_mlp=false"
    for role in ("policy", "critic"):
        with pytest.raises(InvalidRequest, match=asked):
            worker.create_model(
                ModelSpec(model_id="m", base_model="tiny", role=role, lora=EVERYTHING)
            )
    assert worker.create_model(
        ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4, train_mlp=False))
    )


def test_latent_attention_without_adapters_is_refused():
    projections = (
        "self_attn.q_a_proj, self_attn.q_b_proj, self_attn.kv_a_proj_with_mqa, self_attn.kv_b_proj"
    )
    with pytest.raises(
        InvalidRequest,
        match=f"train_attn would leave {projections} of DeepseekV3ForCausalLM frozen",
    ):
        lora_tensors(EVERYTHING, 0, network("deepseek-v3"))


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h", "falcon-h1", "lfm2"])
def test_state_space_layers_without_adapters_are_refused(name: str):
    with pytest.raises(InvalidRequest, match=r"train_attn would leave \w+\.conv"):
        lora_tensors(LoraSpec(rank=4, train_mlp=False), 0, network(name))


@pytest.mark.parametrize("name", [name for name in MODELS if "moe" not in name])
def test_adapters_cover_all_layers_of_dense_models(name: str):
    made = network(name)
    tensors = lora_tensors(EVERYTHING, 0, made)
    assert frozen_weights(made.module, made.linears) == {"train_attn": [], "train_mlp": []}
    adapted = {key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")}
    linears = {
        key for key, layer in made.module.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    assert adapted == linears
