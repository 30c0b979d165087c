"""Verbs of a rank in unusual orders: forwards, loads and saves between a gradient and its step."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_actors import losses
from skyrl_actors.config.strategies import StrategyConfig
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers.interface import Refused
from skyrl_actors.workers.tensor_files import TensorFiles, whole
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.strategy_runs import gathered, run, worker_of

REFERENCE = "reference"
Outputs = dict[str, list[tuple[tuple[int, ...], np.ndarray]]]


class Models:
    """Models that run every verb one after another, or share passes.

    A step is plain gradient descent with this length. Adam's division would enlarge the rounding
    errors of small gradients.
    """

    def __init__(
        self,
        worker: TorchWorker,
        names: list[str],
        data: list[Columns],
        together: bool,
        length: float,
    ):
        self._worker, self.names, self._data, self._together = worker, names, data, together
        self._adam = AdamParams(
            learning_rate=length * 1e6,
            beta1=0.0,
            beta2=0.0,
            eps=1e6,
            weight_decay=0.0,
            grad_clip_norm=1.0,
        )
        self._loss = losses.find("cross_entropy").checked({})

    def _computed(self, columns: Columns, forward_only: bool) -> list[Any]:
        calls = [(name, columns, self._loss) for name in self.names]
        batches = [calls] if self._together else [[call] for call in calls]
        outcomes = [
            outcome for batch in batches for outcome in run(self._worker, batch, forward_only)
        ]
        assert not any(isinstance(outcome, Refused) for outcome in outcomes)
        return [(outcome.rows, outcome.values) for outcome in outcomes]

    def gradient(self, index: int) -> None:
        self._computed(self._data[index], forward_only=False)

    def logprobs(self) -> list[Any]:
        return self._computed(self._data[0], forward_only=True)

    def step(self) -> None:
        for name in self.names:
            self._worker.optim_step(name, self._adam)

    def save(self, folder: Path) -> None:
        for name in self.names:
            self._worker.save_checkpoint(name, str(folder / name), "training", "r1")

    def load(self, folder: Path) -> None:
        for name in self.names:
            self._worker.load_checkpoint(name, str(folder / name), with_optimizer=True)

    def publish(self, folder: Path) -> None:
        """Publish the weights. The file holds the weights before the next step."""
        for name in self.names:
            weights = gathered(self._worker, name, "weights")
            path = folder / f"{name}@1"
            self._worker.export_weights(name, str(path), f"{name}@1", checksums=False)
            if self._worker.spec.rank == 0:
                assert torch.equal(
                    _in_file(path, weights), torch.cat([w.reshape(-1) for w in weights.values()])
                )


def _in_file(path: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [P] in the order of `weights`, from a flat file or a peft folder."""
    if path.is_file():
        return torch.from_numpy(np.fromfile(path, np.float32))
    with TensorFiles(path / "adapter_model.safetensors") as files:
        return torch.cat(
            [whole(files, f"base_model.model.{name}.weight").reshape(-1) for name in weights]
        )


def orders(
    rank: int,
    world: int,
    port: int,
    base: str,
    strategy: StrategyConfig,
    data: list[Columns],
    folder: str,
    options: dict[str, Any],
) -> dict[str, Outputs]:
    """Return the log-probabilities after each order, of a full fine-tune and of adapters."""
    worker = worker_of(rank, world, port, base, strategy, export_dtype="float32", **options)
    worker.create_model(ModelSpec(model_id=REFERENCE, base_model="tiny", lora=LoraSpec(rank=2)))
    full = Models(worker, ["m"], data, together=False, length=2.0)
    shared, alone = (
        Models(worker, [f"a{t}", f"b{t}"], data, together=t, length=0.2) for t in (True, False)
    )
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    for name in (*shared.names, *alone.names):
        worker.create_model(
            ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=4), seed=ord(name[0]))
        )
        state: Any = worker.models[name].state
        state.weights.add_(
            torch.randn(len(state.weights), generator=torch.Generator().manual_seed(5)) * 0.05
        )
    reference = Models(worker, [REFERENCE], data, together=False, length=0.0)
    kinds = {"full": full, "adapters in one pass": shared, "adapters one by one": alone}
    return {kind: _all_orders(models, reference, Path(folder)) for kind, models in kinds.items()}


def _all_orders(models: Models, reference: Models, folder: Path) -> Outputs:
    found: Outputs = {"at the start": models.logprobs()}
    models.save(folder)
    models.gradient(0)
    models.logprobs()
    models.step()
    found["forward between gradient and step"] = models.logprobs()
    models.load(folder)
    models.gradient(1)
    found["reference before a step"] = reference.logprobs()
    models.step()
    found["reference after a step"] = reference.logprobs()
    found["step after a reference"] = models.logprobs()
    models.load(folder)
    models.gradient(2)
    models.publish(folder)
    models.step()
    found["sampler saved between gradient and step"] = models.logprobs()
    models.load(folder)
    found["forward, then load"] = models.logprobs()
    return found
