"""Functions of (rank, world_size, port, …) for tests of model families over several ranks."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from skyrl_actors import losses
from skyrl_actors.config.strategies import StrategyConfig
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.strategy_runs import READ_GRADIENT, gathered, one, run, worker_of


def full_gradient(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    columns: Columns,
    options: dict[str, Any],
) -> tuple[dict[int, np.ndarray], dict[str, torch.Tensor]]:
    """Return the logprobs of this rank's rows, and on rank 0 the gradient of cross_entropy.

    A forward pass comes between the backward pass and the step.
    """
    train_tower = options.pop("train_tower", False)
    worker = worker_of(rank, world, port, base, strategy, **options)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", train_tower=train_tower))
    output = one(worker, "m", columns, "cross_entropy")
    one(worker, "m", columns, "cross_entropy", forward_only=True)
    worker.optim_step("m", READ_GRADIENT)
    lengths = [int(columns.lengths[row]) for row in output.rows]
    parts = np.split(output.values, np.cumsum(lengths)[:-1]) if lengths else []
    gradient = gathered(worker, "m", "exp_avg")
    worker.delete_model("m")
    dist.barrier() if dist.is_initialized() else None
    return dict(zip(output.rows, parts, strict=True)), gradient


def adapter_gradients(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    models: dict[str, tuple[ModelSpec, Columns]],
    options: dict[str, Any],
) -> dict[str, tuple[dict[int, np.ndarray], dict[str, torch.Tensor]]]:
    """Return the logprobs of this rank's rows, and the gradient of cross_entropy, of each model.

    Their rows share passes. A forward pass comes between the backward pass and the step.
    """
    worker = worker_of(rank, world, port, base, strategy, **options)
    calls = []
    for name, (spec, columns) in models.items():
        worker.create_model(spec)
        disturb(worker, name)
        calls.append((name, columns, losses.find("cross_entropy").checked({})))
    outputs = run(worker, calls)
    run(worker, calls, forward_only=True)
    found = {}
    for output, (name, (_, columns)) in zip(outputs, models.items(), strict=True):
        worker.optim_step(name, READ_GRADIENT)
        lengths = [int(columns.lengths[row]) for row in output.rows]
        # In a sequence group, the first rank returns the rows.
        parts = np.split(output.values, np.cumsum(lengths)[:-1]) if lengths else []
        rows = dict(zip(output.rows, parts, strict=True))
        found[name] = (rows, gathered(worker, name, "exp_avg"))
        worker.delete_model(name)
    dist.barrier() if dist.is_initialized() else None
    return found


def disturb(worker: TorchWorker, name: str) -> None:
    """Make the weights of an adapter random. Its B starts at zero."""
    state = worker.models[name].state
    assert isinstance(state, FlatState)
    generator = torch.Generator().manual_seed(len(name) + worker.models[name].spec.seed)
    with torch.no_grad():
        state.weights.add_(torch.randn(state.weights.shape, generator=generator) * 0.02)
