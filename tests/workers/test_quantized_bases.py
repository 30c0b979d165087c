"""Base models with quantized files are trained with the numbers that the files stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.base_files import BaseTensors
from skyrl_actors.workers.model_factory import info_of
from skyrl_actors.workers.tensor_files import TensorFiles, whole
from tests.workers import family_runs
from tests.workers.family_runs import disturb
from tests.workers.quantized_models import copies, quantized
from tests.workers.ranks import Ranks
from tests.workers.references import batch
from tests.workers.strategy_runs import STRATEGIES, one, worker_of
from tests.workers.tiny_models import SIZE

COLUMNS = batch(3, (5, 9, 9, 23))
METHODS = ("mxfp4", "fp8")


@pytest.fixture
def both(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """The folders of a model with quantized weights, and of the same model with dense ones."""
    if request.param == "fp8":
        return quantized("qwen3-moe", "fp8", tmp_path)
    torch.manual_seed(7)
    config = GptOssConfig(
        **SIZE | {"hidden_size": 64, "intermediate_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    made = tmp_path / "made"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made)
    return copies(made, "mxfp4", tmp_path)


@pytest.mark.parametrize("both", METHODS, indirect=True)
def test_any_range_of_the_packed_numbers_can_be_read(both: tuple[Path, Path]):
    packed, dense = both
    with BaseTensors(packed) as found, TensorFiles(dense) as wanted:
        assert found.shapes == wanted.shapes
        for key in wanted.shapes:
            expected = whole(wanted, key)
            assert torch.equal(whole(found, key).float(), expected), key
            size = expected.numel()
            for start, stop in ((0, 0), (3, size // 2), (size // 3, size), (size, size)):
                part = found.range(key, start, stop)
                assert torch.equal(part.float(), expected.reshape(-1)[start:stop])
    assert info_of(str(packed)) == info_of(str(dense))


def gradient(base: Path, lora: LoraSpec | None) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    worker = worker_of(0, 1, 0, str(base), ReplicaStrategy(), budget=128)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
    if lora:
        disturb(worker, "m")
    values = one(worker, "m", COLUMNS, "cross_entropy").values
    state: Any = worker.models["m"].state
    return values, {name: view.clone() for name, view in state.split(state.gradients).items()}


@pytest.mark.parametrize("both", METHODS, indirect=True)
@pytest.mark.parametrize("lora", [LoraSpec(rank=4), None])
def test_adapters_and_full_fine_tunes_train_on_them(both: tuple[Path, Path], lora: LoraSpec | None):
    (values, found), (wanted, expected) = (gradient(base, lora) for base in both)
    np.testing.assert_array_equal(values, wanted)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("both", "strategy"),
    [
        ("mxfp4", "fsdp2"),
        ("fp8", "zero3"),
        pytest.param("mxfp4", "zero3", marks=pytest.mark.slow),
        pytest.param("fp8", "fsdp2", marks=pytest.mark.slow),
    ],
    indirect=["both"],
)
def test_ranks_read_their_own_part(ranks: dict[int, Ranks], both: tuple[Path, Path], strategy: str):
    spec = ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4))
    packed, dense = (
        ranks[2].run(
            family_runs.adapter_gradients,
            str(base),
            STRATEGIES[strategy],
            {"m": (spec, COLUMNS)},
            {},
        )[0]["m"]
        for base in both
    )
    for row, values in dense[0].items():
        np.testing.assert_array_equal(packed[0][row], values)
    assert all(torch.equal(packed[1][key], value) for key, value in dense[1].items())


@pytest.mark.parametrize("both", METHODS, indirect=True)
@pytest.mark.parametrize("lora", [LoraSpec(rank=4), None])
def test_saved_models_are_dense(both: tuple[Path, Path], lora: LoraSpec | None, tmp_path: Path):
    worker = worker_of(0, 1, 0, str(both[0]), ReplicaStrategy(), budget=128)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
    if lora:
        disturb(worker, "m")
    folder = tmp_path / "saved"
    worker.save_checkpoint("m", str(folder), "merged" if lora else "weights", "r1")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    reopened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    values = one(worker, "m", COLUMNS, "cross_entropy", forward_only=True).values
    targets, start = torch.from_numpy(COLUMNS.fields["target_tokens"]).long(), 0
    for length in COLUMNS.lengths.tolist():
        row = slice(start, start + length)
        tokens = torch.from_numpy(COLUMNS.tokens[row]).long()
        logprobs = reopened(tokens[None]).logits[0].log_softmax(-1)
        wanted = logprobs.gather(1, targets[row][:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(values[row], wanted, atol=1e-5)
        start += length


def test_other_quantizations_are_refused(tmp_path: Path):
    packed, _ = quantized("qwen3-moe", "fp8", tmp_path)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantized with 'awq', and trainers read mxfp4"):
        BaseTensors(packed)
