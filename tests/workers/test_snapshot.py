"""A model that is restored from a snapshot continues bit by bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.workers import snapshot
from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

CALL = losses.find("cross_entropy").checked({})
KINDS = [
    ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=8), seed=3),
    ModelSpec(model_id="m", base_model="tiny"),
    ModelSpec(model_id="m", base_model="tiny", role="critic", lora=LoraSpec(rank=4), seed=1),
]


def worker(base: Path) -> TorchWorker:
    made = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=64,
            collective_timeout_s=30.0,
        )
    )
    made.setup("127.0.0.1", 0)
    return made


def batch(seed: int, critic: bool):
    rng = np.random.default_rng(seed)
    names = ("values", "returns") if critic else ("weights",)
    return columns_from(
        [
            Example(
                rng.integers(0, 256, n).astype(np.int32),
                {
                    **({} if critic else {TARGETS: rng.integers(0, 256, n).astype(np.int32)}),
                    **{name: rng.normal(0, 1, n).astype(np.float32) for name in names},
                },
            )
            for n in (5, 17, 9)
        ]
    )


def computed(at: TorchWorker, columns: Columns, call: LossCall) -> None:
    (output,) = at.forward_backward(
        (PartCall(model_id="m", rows=(0, 1, 2), columns=columns, loss=call),), False
    )
    assert isinstance(output, RowOutput)


def work(at: TorchWorker, spec: ModelSpec, seeds: range) -> None:
    """Run two batches and a step for each seed, then a batch that stays pending."""
    call = losses.find("ppo_critic").checked({}) if spec.role == "critic" else CALL
    columns = [batch(seed, spec.role == "critic") for seed in seeds]
    for one in columns:
        for _ in range(2):
            computed(at, one, call)
        at.optim_step("m", AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0))
    computed(at, columns[0], call)


@pytest.mark.parametrize("spec", KINDS, ids=("lora", "full", "critic"))
def test_a_restored_model_continues_bit_by_bit(random_base: Path, tmp_path: Path, spec: ModelSpec):
    straight, again = worker(random_base), worker(random_base)
    straight.create_model(spec)
    work(straight, spec, range(3))
    handle = straight.copy_state("m").handle
    work(straight, spec, range(3, 6))  # the copy holds the state before this
    straight.write_state(handle, str(tmp_path))
    again.restore_state(spec, str(tmp_path))
    work(again, spec, range(3, 6))
    a, b = straight.models["m"].state, again.models["m"].state
    assert torch.equal(a.weights, b.weights)
    assert (
        a.gradients is not None
        and b.gradients is not None
        and torch.equal(a.gradients, b.gradients)
    )
    assert {k: v.tolist() for k, v in a.optimizer_tensors().items()} == {
        k: v.tolist() for k, v in b.optimizer_tensors().items()
    }


def test_without_pending_gradients_none_are_written(random_base: Path, tmp_path: Path):
    made = worker(random_base)
    made.create_model(KINDS[0])
    made.write_state(made.copy_state("m").handle, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "model_spec.json",
        "state.safetensors",
    ]


def test_gradient_shares_load_under_another_number_of_ranks(random_base: Path, tmp_path: Path):
    made = worker(random_base)
    made.create_model(KINDS[0])
    work(made, KINDS[0], range(1))
    state = made.models["m"].state
    assert state.gradients is not None
    whole = state.gradients.clone()
    copy = snapshot.copy_of(made.models["m"])
    for rank in range(2):
        copy.gradients = whole * (0.25 + 0.5 * rank)
        copy.write(tmp_path, rank, 2)
    for rank, world_size, share in (
        (0, 2, 0.25),
        (1, 2, 0.75),
        (0, 1, 1.0),
        (0, 3, 1.0),
        (2, 3, 0.0),
    ):
        state.drop_gradients()
        snapshot.load(state, tmp_path, rank, world_size)
        torch.testing.assert_close(state.gradients, whole * share, rtol=1e-6, atol=0)
