"""What a trained model's state offers, however its weights are held: whole on each rank, or sharded over them.

Verbs marked *collective* are called on every rank of the group, in the same order.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.workers.tensor_files import Shape, Source

Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
NORM_PIECE = 2**22  # numbers that a norm holds in float64 at a time: 32 MiB


class TrainState(Protocol):
    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of the whole tensors."""
        ...

    pending: bool
    """A gradient was added since the last step, on this rank or another."""

    @property
    def num_parameters(self) -> int: ...

    def backward(self, surrogate: Tensor) -> None:
        """Add the gradient of a sum over this rank's tokens. Collective where weights are sharded."""
        ...

    def drop_gradients(self) -> None: ...

    def step(self, adam: AdamParams) -> float:
        """Collective. Sum gradients over ranks, clip to the global norm, apply AdamW, clear; returns the norm before clipping.

        A norm that is not finite changes no weight: the gradients are dropped and InvalidRequest is raised, on every rank.
        """
        ...

    @property
    def num_steps(self) -> int:
        """Of the optimizer; 0: it has no moments."""
        ...

    def tensors(self, kind: Kind) -> Iterator[tuple[str, Tensor | None]]:
        """Collective. float32 on the host of rank 0, in the order of `shapes`; None on the other ranks."""
        ...

    def load(self, source: Source) -> None:
        """Overwrite the weights, each rank its part. Raises InvalidRequest when names or shapes differ; then nothing changed."""
        ...

    def load_moments(self, sources: Mapping[Kind, Source], num_steps: int) -> None:
        """No sources: a new optimizer."""
        ...

    def move(self, part: str, device: torch.device) -> None: ...

    def close(self) -> None:
        """The model is deleted: whatever else holds its tensors lets go of them."""
        ...


def check_names(ours: Mapping[str, Shape], given: Mapping[str, Shape]) -> None:
    if dict(ours) != dict(given):
        odd = sorted({*ours.items()} ^ {*given.items()})[:4]
        raise InvalidRequest(f"the checkpoint's tensors are not this model's: {odd}")


def sum_of_squares(vector: Tensor) -> Tensor:
    """[] float64, on the vector's device. In pieces: a wider copy of the whole would take twice the memory of the vector."""
    pieces = vector.detach().reshape(-1).split(NORM_PIECE)
    return torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) ** 2 for p in pieces]).sum()


def check_norm(norm: float, state: TrainState) -> None:
    """Raises InvalidRequest, with the gradients dropped, when it is not finite."""
    if not math.isfinite(norm):
        state.drop_gradients()
        raise InvalidRequest(f"gradient norm is {norm}: the step was not applied and the gradients were dropped; check the data")


def adam_group(adam: AdamParams) -> dict[str, Any]:
    """As torch.optim names them."""
    return {
        "lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps, "weight_decay": adam.weight_decay,
    }  # fmt: skip
