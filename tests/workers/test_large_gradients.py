"""A step whose gradient float32 cannot square is refused, and nothing of it is applied."""

import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import AdamParams, ModelSpec
from skyrl_actors.workers.interface import PartCall
from tests.workers import strategy_runs as runs
from tests.workers.tiny_models import make

STEP = AdamParams(learning_rate=1e-2)


def columns(weight: float) -> Columns:
    tokens = np.arange(5, dtype=np.int32)
    return columns_from(
        [Example(tokens, {TARGETS: tokens, "weights": np.full(5, weight, np.float32)})]
    )


@pytest.mark.parametrize("strategy", ["replica", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_refused_step_leaves_no_trace(strategy: str, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base = make("qwen3", tmp_path / "base")
    worker = runs.worker_of(0, 1, port, str(base), runs.STRATEGIES[strategy])
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    state = worker.models["m"].state

    def weights() -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in state.tensors("weights") if t is not None}

    def train(weight: float) -> None:
        call = losses.find("cross_entropy").checked({})
        given = PartCall(model_id="m", rows=(0,), columns=columns(weight), loss=call)
        worker.forward_backward((given,), False)

    before = weights()
    train(1e24)
    with pytest.raises(InvalidRequest, match="the step was not applied"):
        worker.optim_step("m", STEP)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights().items())
    train(1.0)
    assert 0 < worker.optim_step("m", STEP)["skyrl.ai/grad_norm"] < 1e4
    moved = weights()
    for name, tensor in moved.items():
        assert tensor.isfinite().all() and not torch.equal(before[name], tensor), name
