"""Architectures by tiny random configs: gradients against float64 transformers, exports opened by transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_actors import losses
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers import checkpoint
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import Reference, batch, relative
from tests.workers.tiny_models import MODELS, make

CALL = losses.find("cross_entropy").checked({})
LENGTHS = (5, 23, 9, 9)  # longer than the sliding windows


def worker_for(base: Path) -> TorchWorker:
    worker = TorchWorker(WorkerSpec("policy", 0, 1, str(base), "float32", "cpu", 1, 64, 60.0))
    worker.setup("127.0.0.1", 0)
    return worker


def computed(worker: TorchWorker, seed: int) -> RowOutput:
    columns = batch(seed, LENGTHS)
    (output,) = worker.forward_backward((PartCall("m", tuple(range(4)), columns, CALL),), False)
    assert isinstance(output, RowOutput)
    return output


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_export(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = make(name, tmp_path / "base")
    worker = worker_for(base)
    worker.create_model(ModelSpec("m", "tiny"))
    output, reference, columns = computed(worker, 3), Reference(base), batch(3, LENGTHS)
    total = reference.backward("cross_entropy", columns)
    state = worker.models["m"].state
    assert isinstance(state, FlatState) and state.gradients is not None
    np.testing.assert_allclose(output.values, torch.cat(reference.rows(columns)).detach().numpy(), atol=2e-5)
    assert output.sums["loss:sum"] == pytest.approx(total, rel=1e-5)
    wanted = reference.gradients()
    for key, gradient in state.split(state.gradients).items():
        assert relative(gradient, wanted[key]) < 1e-5, key

    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)  # several files, as of a large model
    worker.optim_step("m", AdamParams(1e-2))
    worker.save_checkpoint("m", str(tmp_path / "saved"), "training", "r1")
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for key, parameter in opened.named_parameters():
        assert torch.equal(parameter, state.views[key]), key
    again = worker_for(base)
    again.create_model(ModelSpec("m", "tiny"))
    again.load_checkpoint("m", str(tmp_path / "saved"), True)
    computed(worker, 5), computed(again, 5)
    worker.optim_step("m", AdamParams(1e-3)), again.optim_step("m", AdamParams(1e-3))
    assert torch.equal(state.weights, again.models["m"].state.weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_on_it_merges_into_what_it_computes(name: str, tmp_path: Path):
    base = make(name, tmp_path / "base")
    worker = worker_for(base)
    lora = LoraSpec(4, train_mlp=name != "qwen3-moe", train_unembed=name != "gemma3")
    worker.create_model(ModelSpec("m", "tiny", lora=lora))
    computed(worker, 3)
    worker.optim_step("m", AdamParams(1e-2))
    output = computed(worker, 4)
    worker.save_checkpoint("m", str(tmp_path / "merged"), "merged", "r1")
    rows = torch.cat(Reference(tmp_path / "merged").rows(batch(4, LENGTHS)))
    np.testing.assert_allclose(output.values, rows.detach().numpy(), atol=5e-5)
