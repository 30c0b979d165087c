"""An adapter trains everything that its switches name, or the spec is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.coverage import frozen_weights
from skyrl_actors.workers.interface import WorkerSpec
from skyrl_actors.workers.low_rank import joined
from skyrl_actors.workers.models import lora_tensors
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.tiny_models import CONFIGS, MODELS, REFUSED, make

ROUTED = "feed_forward.experts.gate_up_proj, feed_forward.experts.down_proj"
EVERYTHING = LoraSpec(rank=4)


def network(name: str) -> Network:
    return Network(AutoModelForCausalLM.from_config(CONFIGS[name]), torch.device("cpu"), "keep")


def test_experts_of_other_code_are_refused(tmp_path: Path):
    base = make("llama4", tmp_path / "base")
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
    asked = f"train_mlp would leave {ROUTED} of Llama4ForCausalLM frozen: .* set train_mlp=false"
    for role in ("policy", "critic"):
        with pytest.raises(InvalidRequest, match=asked):
            worker.create_model(
                ModelSpec(model_id="m", base_model="tiny", role=role, lora=EVERYTHING)
            )
    assert worker.create_model(
        ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4, train_mlp=False))
    )


@pytest.mark.parametrize("place", ["self_attn", "mlp"])
def test_an_unknown_projection_is_refused(place: str):
    made = network("llama")
    layer = made.module.model.layers[1].get_submodule(place)
    layer.register_module("mixing_proj", torch.nn.Linear(8, 8))
    switch = {"self_attn": "train_attn", "mlp": "train_mlp"}[place]
    with pytest.raises(InvalidRequest, match=f"{switch} would leave {place}.mixing_proj of Llama"):
        lora_tensors(EVERYTHING, 0, made)


def test_an_adapter_of_nothing_is_refused():
    off = LoraSpec(rank=4, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(InvalidRequest, match="trains nothing: set at least one of train_attn"):
        lora_tensors(off, 0, network("llama"))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in (*REFUSED, "llama4")])
def test_adapters_cover_all_layers(name: str):
    made = network(name)
    tensors = lora_tensors(EVERYTHING, 0, made)
    assert frozen_weights(made.module, made.terms) == {"train_attn": [], "train_mlp": []}
    assert {key.rsplit(".", 1)[0] for key in tensors} == made.terms.keys()


@pytest.mark.parametrize("name", [name for name in MODELS if "moe" not in name])
def test_each_linear_layer_of_dense_models_has_a_term(name: str):
    made = network(name)
    linears = {
        key for key, layer in made.module.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    assert made.terms.keys() == linears


def test_the_terms_of_a_gated_delta_net_are_its_queries_keys_values_and_gate():
    """The model's own code says which outputs are which."""
    made = network("qwen3-next")
    layer = made.module.model.layers[0].linear_attn
    size = layer.in_proj_qkvz.out_features
    outputs = torch.arange(size, dtype=torch.float32)[None, None]
    rest = torch.zeros(1, 1, layer.in_proj_ba.out_features)
    parts = layer.fix_query_key_value_ordering(outputs, rest)[:4]
    for key, values in zip("qkvz", parts, strict=True):
        term = made.terms[f"model.layers.0.linear_attn.in_proj_{key}"]
        product = torch.ones(1, term.out_features)
        placed = joined([(term.part, product)], product, size)[0]
        assert placed.nonzero()[:, 0].tolist() == sorted(values.flatten().int().tolist())
