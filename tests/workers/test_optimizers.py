"""Muon and 8-bit AdamW over a flat vector, against their packages and through checkpoints."""

import gc
import weakref
from pathlib import Path

import bitsandbytes
import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec, OptimizerName
from skyrl_actors.workers import adamw8bit
from skyrl_actors.workers.adamw8bit import BLOCK, SMALLEST, FlatAdamW8bit, decoded, encoded
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, WorkerSpec
from skyrl_actors.workers.state import adam_group
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import batch
from tests.workers.tiny_models import make

CALL = losses.find("cross_entropy").checked({})
ADAMS = [
    AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01),
    AdamParams(
        learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.0, grad_clip_norm=2.0
    ),
    AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
]


def worker_for(base: Path) -> TorchWorker:
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
    return worker


def state(worker: TorchWorker) -> FlatState:
    found = worker.models["m"].state
    assert isinstance(found, FlatState)
    return found


def compute(worker: TorchWorker, seed: int) -> None:
    worker.forward_backward(
        (PartCall(model_id="m", rows=(0, 1, 2), columns=batch(seed, (9, 4, 17)), loss=CALL),), False
    )


def save(worker: TorchWorker, folder: Path) -> Path:
    """Save a checkpoint and a snapshot."""
    worker.save_checkpoint("m", str(folder / "saved"), "training", "r1")
    (folder / "copied").mkdir()
    worker.write_state(worker.copy_state("m").handle, str(folder / "copied"))
    return folder


def check_goes_on(worker: TorchWorker, again: TorchWorker, spec: ModelSpec, saved: Path) -> None:
    """Compare the next step; since the save, `worker` has made one (last of ADAMS, batch 2)."""
    for way in ("saved", "copied"):
        if way == "saved":
            again.create_model(spec)
            again.load_checkpoint("m", str(saved / way), True)
        else:
            again.restore_state(spec, str(saved / way))
        compute(again, 2)
        again.optim_step("m", ADAMS[2])
        assert torch.equal(state(again).weights, state(worker).weights), way


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_muon_equals_torch(tmp_path: Path, lora: LoraSpec | None):
    base = make("qwen3-untied", tmp_path / "base")
    worker, again = worker_for(base), worker_for(base)
    spec = ModelSpec(model_id="m", base_model="tiny", lora=lora, optimizer="muon")
    worker.create_model(spec)
    held = state(worker)
    copies = {name: torch.nn.Parameter(view.detach().clone()) for name, view in held.views.items()}
    hidden = {
        n
        for n, p in copies.items()
        if p.ndim == 2 and not any(part in n for part in ("embed_tokens", "lm_head"))
    }
    muon = torch.optim.Muon(
        [copies[n] for n in copies if n in hidden], adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([copies[n] for n in copies if n not in hidden])
    for i, adam in enumerate(ADAMS):
        compute(worker, i)
        assert held.gradients is not None
        norm = float(held.gradients.double().norm())
        factor = min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm else 1.0
        for name, gradient in held.split(held.gradients * factor).items():
            copies[name].grad = gradient.clone()
        muon.param_groups[0].update(
            lr=adam.learning_rate, weight_decay=adam.weight_decay, momentum=adam.beta1
        )
        adamw.param_groups[0].update(
            lr=adam.learning_rate,
            weight_decay=adam.weight_decay,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
        )
        muon.step()
        adamw.step()
        worker.optim_step("m", adam)
        for name, view in held.views.items():
            torch.testing.assert_close(
                view.detach(), copies[name].detach(), rtol=1e-5, atol=1e-6, msg=name
            )
        if i == 1:
            saved = save(worker, tmp_path)
    check_goes_on(worker, again, spec, saved)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_8_bit_adamw_equals_bitsandbytes(tmp_path: Path, lora: LoraSpec | None):
    """The first step equals AdamW in float64, and training resumes bit by bit."""
    base = make("qwen3-untied", tmp_path / "base")
    worker, again = worker_for(base), worker_for(base)
    spec = ModelSpec(model_id="m", base_model="tiny", lora=lora, optimizer="adamw8bit")
    worker.create_model(spec)
    held = state(worker)
    assert held.num_parameters > SMALLEST
    theirs = torch.nn.Parameter(held.weights.clone())
    exact = torch.nn.Parameter(held.weights.double())
    inner = bitsandbytes.optim.AdamW8bit([theirs])
    wide = torch.optim.AdamW([exact])
    for i, adam in enumerate(ADAMS):
        compute(worker, i)
        assert held.gradients is not None
        norm = float(held.gradients.double().norm())
        gradient = held.gradients * (
            min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm else 1.0
        )
        for parameter, optimizer in ((theirs, inner), (exact, wide)):
            parameter.grad = gradient.to(parameter.dtype).clone()
            optimizer.param_groups[0].update(adam_group(adam))
            optimizer.step()
        worker.optim_step("m", adam)
        torch.testing.assert_close(held.weights, theirs.detach(), rtol=1e-6, atol=1e-8)
        if i == 0:  # moments are rounded only after their step
            torch.testing.assert_close(held.weights.double(), exact.detach(), rtol=1e-5, atol=1e-7)
        if i == 1:
            saved = save(worker, tmp_path)
    assert isinstance(held.optimizer, FlatAdamW8bit)
    codes = held.optimizer._states[0]["state1"]  # type: ignore[reportPrivateUsage]
    assert codes.dtype == torch.uint8 and len(codes) == held.num_parameters
    check_goes_on(worker, again, spec, saved)


def test_8_bit_adamw_in_slices_equals_the_whole(monkeypatch: pytest.MonkeyPatch):
    """The kernels count in 32 bits, so longer vectors are several parameters of bitsandbytes."""
    size = 40 * BLOCK + 100
    made = torch.Generator().manual_seed(0)
    weights = torch.randn(size, generator=made)
    gradients = [torch.randn(size, generator=made) for _ in ADAMS]
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for most in (size, 16 * BLOCK):
        monkeypatch.setattr(adamw8bit, "MOST_WEIGHTS", most)
        own = weights.clone()
        optimizer = FlatAdamW8bit(own)
        for gradient, adam in zip(gradients[:2], ADAMS, strict=False):
            optimizer.step(gradient.clone(), adam)
        again_weights = own.clone()
        again = FlatAdamW8bit(again_weights)
        again.load(optimizer.moments())
        for one in (optimizer, again):
            one.move(torch.device("cpu"))
            one.step(gradients[-1].clone(), ADAMS[-1])
        assert torch.equal(own, again_weights) and again.num_steps == 3
        found.append((own, optimizer.moments()))
    assert len(optimizer._states) == 3  # type: ignore[reportPrivateUsage]
    assert torch.equal(found[0][0], found[1][0])
    for name, values in found[0][1].items():
        assert torch.equal(values, found[1][1][name]), name


@pytest.mark.parametrize("kind", [1, 2])
def test_codes_are_recovered_bit_by_bit(monkeypatch: pytest.MonkeyPatch, kind: int):
    """Blocks have every scale, one sign, or only zeros.

    Other values are off by at most the step of the table.
    """
    table = bitsandbytes.functional.create_dynamic_map(signed=kind == 1)
    generator = torch.Generator().manual_seed(kind)
    codes = torch.randint(0, 256, (2000 * BLOCK + 17,), generator=generator, dtype=torch.int16).to(
        torch.uint8
    )
    codes[:BLOCK] = int(table.abs().argmin())
    scales = 10 ** (torch.rand(2001, generator=generator) * 20 - 15)
    # In a real block, one value has the largest magnitude: code 255 (1.0), or code 0 among
    # negatives.
    largest = torch.where(torch.rand(2001, generator=generator) < 0.5, 255, 0 if kind == 1 else 255)
    for block in range(1, 2001):
        own = codes[block * BLOCK : (block + 1) * BLOCK]
        if largest[block] == 0:
            own[own == 255] = 254
        own[0] = int(largest[block])
    monkeypatch.setattr(adamw8bit, "AT_ONCE", 700 * BLOCK)
    values = decoded(codes, table, scales)
    assert torch.equal(decoded(*_with(table, encoded(values, table))), values)
    plain = (
        torch.randn(3000, generator=generator)
        if kind == 1
        else torch.rand(3000, generator=generator)
    )
    found = decoded(*_with(table, encoded(plain, table)))
    theirs, their_state = bitsandbytes.functional.quantize_blockwise(
        plain, code=table, blocksize=BLOCK
    )
    there = bitsandbytes.functional.dequantize_blockwise(theirs, their_state)
    assert float((found - plain).abs().max()) <= float((there - plain).abs().max()) * 1.01


def _with(
    table: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return found[0], table, found[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_gradients_that_leave_the_device_are_not_kept_by_the_optimizer(optimizer: OptimizerName):
    weights = {"layers.q_proj.weight": torch.randn(64, 64), "norm.weight": torch.ones(64)}
    made = FlatState(weights, torch.device("cpu"), optimizer=optimizer)
    kept = weakref.ref(made.ensure_gradients().fill_(1.0).untyped_storage())
    assert made.step(AdamParams(learning_rate=1e-3)) > 0
    made.move("optimizer", torch.device("meta"))
    made.move("gradients", torch.device("meta"))
    gc.collect()
    assert kept() is None
