"""Muon over a flat vector: as torch.optim.Muon and AdamW on separate tensors, and through checkpoints."""

from pathlib import Path

import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import batch
from tests.workers.tiny_models import make

CALL = losses.find("cross_entropy").checked({})
ADAMS = [
    AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.01),
    AdamParams(3e-3, 0.8, 0.99, 1e-6, 0.0, 2.0),
    AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.1),
]


def worker_for(base: Path) -> TorchWorker:
    worker = TorchWorker(WorkerSpec("policy", 0, 1, str(base), "float32", "cpu", 1, 64, 60.0))
    worker.setup("127.0.0.1", 0)
    return worker


def state(worker: TorchWorker) -> FlatState:
    found = worker.models["m"].state
    assert isinstance(found, FlatState)
    return found


def compute(worker: TorchWorker, seed: int) -> None:
    worker.forward_backward((PartCall("m", (0, 1, 2), batch(seed, (9, 4, 17)), CALL),), False)


@pytest.mark.parametrize("lora", [None, LoraSpec(4)])
def test_muon_is_torchs(tmp_path: Path, lora: LoraSpec | None):
    base = make("qwen3-untied", tmp_path / "base")
    worker, again = worker_for(base), worker_for(base)
    spec = ModelSpec("m", "tiny", lora=lora, optimizer="muon")
    worker.create_model(spec)
    held = state(worker)
    copies = {name: torch.nn.Parameter(view.detach().clone()) for name, view in held.views.items()}
    hidden = {n for n, p in copies.items() if p.ndim == 2 and not any(part in n for part in ("embed_tokens", "lm_head"))}
    muon = torch.optim.Muon([copies[n] for n in copies if n in hidden], adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([copies[n] for n in copies if n not in hidden])
    for i, adam in enumerate(ADAMS):
        compute(worker, i)
        assert held.gradients is not None
        norm = float(held.gradients.double().norm())
        factor = min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm else 1.0
        for name, gradient in held.split(held.gradients * factor).items():
            copies[name].grad = gradient.clone()
        muon.param_groups[0].update(lr=adam.learning_rate, weight_decay=adam.weight_decay, momentum=adam.beta1)
        adamw.param_groups[0].update(
            lr=adam.learning_rate, weight_decay=adam.weight_decay, betas=(adam.beta1, adam.beta2), eps=adam.eps
        )
        muon.step(), adamw.step()
        worker.optim_step("m", adam)
        for name, view in held.views.items():
            torch.testing.assert_close(view.detach(), copies[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
        if i == 1:
            worker.save_checkpoint("m", str(tmp_path / "saved"), "training", "r1")
            handle = worker.copy_state("m")
    (tmp_path / "copied").mkdir()
    worker.write_state(handle, str(tmp_path / "copied"))
    for way in ("saved", "copied"):
        if way == "saved":
            again.create_model(spec)
            again.load_checkpoint("m", str(tmp_path / "saved"), True)
        else:
            again.restore_state(spec, str(tmp_path / "copied"))
        compute(again, 2)
        again.optim_step("m", ADAMS[2])
        assert torch.equal(state(again).weights, held.weights), way
