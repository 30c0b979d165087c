"""The norm of a gradient equals float64 in bounded memory."""

import numpy as np
import pytest
import torch

from skyrl_actors.messages.model import AdamParams
from skyrl_actors.workers import state
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.state import sum_of_squares
from tests.workers.measured_memory import peak_bytes


@pytest.fixture
def piece(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(state, "NORM_PIECE", 2**14)
    return 2**14


@pytest.mark.parametrize("size", [0, 1, 2**14, 100_003])
def test_the_sum_of_squares_equals_float64(piece: int, size: int):
    vector = (
        torch.randn(size, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-6, 6, max(size, 1))[:size]
    )
    exact = float((vector.numpy().astype(np.longdouble) ** 2).sum())
    assert float(sum_of_squares(vector)) == pytest.approx(exact, rel=1e-12)


def test_the_memory_of_a_step_does_not_grow_with_the_model(piece: int):
    model = FlatState({"w": torch.zeros(50 * piece)}, torch.device("cpu"))
    adam = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
    model.ensure_gradients().fill_(1.0)
    model.step(adam)  # the first step creates the moments
    model.ensure_gradients().fill_(1.0)
    assert peak_bytes(lambda: model.step(adam)) < 1.5 * 8 * piece
