"""The state of a trained model, with weights that are whole on each rank or sharded over ranks.

Methods marked *collective* are called on every rank of the group, in the same order.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.workers.sharded_files import Piece
from skyrl_actors.workers.tensor_files import Shape, Source

VECTORS = "are_vectors"  # key of an optimizer's groups
P = TypeVar("P")
HOST = torch.device("cpu")
Kind = Literal["weights", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
LARGEST_NORM = 1.8e19  # its square is just a number of float32
NORM_PIECE = 2**22  # numbers of a norm in float64 at a time: 32 MiB


class TrainState(Protocol):
    """Weights, gradients and optimizer of a trained model."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of the whole tensors, by name."""
        ...

    pending: bool
    """Whether a gradient was added since the last step, on this rank or another."""

    whole: bool
    """Whether every rank holds all of it; then it is a `WholeState`."""

    @property
    def num_parameters(self) -> int: ...

    def backward(self, surrogate: Tensor) -> None:
        """Add the gradient of a sum over this rank's tokens. Collective with sharded weights."""
        ...

    def drop_gradients(self) -> None: ...

    def step(self, adam: AdamParams) -> float:
        """Reduce and clip the gradients, apply AdamW, and clear them. Collective.

        Gradients are summed over ranks and clipped to the global norm. Returns the norm before
        clipping. If the norm is not finite, no weight changes: the gradients are dropped, and every
        rank raises InvalidRequest.
        """
        ...

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps; 0 without moments."""
        ...

    def tensors(
        self,
        kind: Kind,
        dtype: torch.dtype = torch.float32,
        device: torch.device = HOST,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield tensors in the order of `shapes`. Collective.

        Rank 0 gets them in this dtype on this device. The other ranks get None, or the same with
        `everywhere`. Shards are converted before they are gathered. They are gathered on the
        network's device, also when they are in host memory.
        """
        ...

    def own_pieces(self, kind: Kind) -> Iterator[Piece]:
        """Yield the ranges that this rank holds, in float32 on any device. Not collective.

        Together, the ranks yield every element once. Weights that every rank holds whole come from
        rank 0.
        """
        ...

    def load(self, source: Source) -> None:
        """Overwrite the weights; each rank loads its part.

        Raises InvalidRequest, without any change, when names or shapes differ.
        """
        ...

    def load_moments(self, sources: Mapping[Kind, Source], num_steps: int) -> None:
        """Load moments. Without sources, the optimizer starts again."""
        ...

    def move(self, part: str, device: torch.device) -> None: ...

    def close(self) -> None:
        """Release the tensors of a deleted model."""
        ...


class WholeState(TrainState, Protocol):
    """A state that every rank holds whole, as vectors of all P weights.

    A gradient can then be undone, and weights are read without other ranks.
    """

    @property
    def views(self) -> Mapping[str, Tensor]:
        """The weights that a pass computes with, by name."""
        ...

    def begin(self) -> None:
        """Prepare to add gradients, before a backward pass of several models."""
        ...

    def collect(self) -> None:
        """Add what a backward pass left to the pending gradients."""
        ...

    def saved_gradients(self) -> Any:
        """Return a copy of the pending gradients, for `put_back`."""
        ...

    def put_back(self, saved: Any) -> None:
        """Restore the gradients that `saved_gradients` returned."""
        ...

    def free_empty_gradients(self) -> None:
        """Free the memory of gradients if none are pending."""
        ...

    def live(self) -> Tensor:
        """Return the weights [P] float32, which the next step changes, on their device."""
        ...

    def copied(self) -> dict[str, Tensor]:
        """Copy weights [P], and after a step exp_avg [P], exp_avg_sq [P] and step [], to memory."""
        ...

    def copied_gradients(self) -> Tensor | None:
        """Copy the pending gradients [P] to host memory; None if they are zero."""
        ...

    def add_gradients(self, gradients: Tensor) -> None:
        """Add [P] float32 of any device to the pending gradients."""
        ...


def is_whole(state: TrainState) -> TypeGuard[WholeState]:
    """Return whether every rank holds all of a state."""
    return state.whole


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def check_names(ours: Mapping[str, Shape], given: Mapping[str, Shape]) -> None:
    """Raise InvalidRequest unless names and shapes match."""
    if dict(ours) != dict(given):
        odd = sorted({*ours.items()} ^ {*given.items()})[:4]
        raise InvalidRequest(f"the tensors of the checkpoint do not match the model: {odd}")


def sum_of_squares(vector: Tensor) -> Tensor:
    """Return the sum of squares, [] float64, on the vector's device.

    It works in pieces, because a float64 copy would take twice the memory of the vector.
    """
    pieces = vector.detach().reshape(-1).split(NORM_PIECE)
    return torch.stack(
        [torch.linalg.vector_norm(p, dtype=torch.float64) ** 2 for p in pieces]
    ).sum()


def check_norm(norm: float, state: TrainState, clip: float) -> None:
    """Raise InvalidRequest and drop the gradients if the norm is not finite or too large.

    Too large, after clipping to `clip` (0: none), is what float32 cannot square: a second moment
    that became infinite would never let its weight move again.
    """
    if math.isfinite(norm) and min(norm, clip or norm) <= LARGEST_NORM:
        return
    state.drop_gradients()
    advice = ", or set adam_params.grad_clip_norm" if math.isfinite(norm) else ""
    raise InvalidRequest(
        f"gradient norm is {norm}: the step was not applied and the gradients were dropped; "
        f"check the data{advice}"
    )


def parameter_groups(
    parameters: Mapping[str, P], shapes: Mapping[str, Shape]
) -> list[dict[str, Any]]:
    """Return the groups of a torch optimizer: matrices, and vectors if there are any."""
    matrices = [p for name, p in parameters.items() if len(shapes[name]) > 1]
    vectors = [p for name, p in parameters.items() if len(shapes[name]) <= 1]
    groups = [{"params": matrices, VECTORS: False}, {"params": vectors, VECTORS: True}]
    return [group for group in groups if group["params"]]


def update_groups(groups: Iterable[dict[str, Any]], adam: AdamParams) -> None:
    """Set the options of one step in `parameter_groups`."""
    for group in groups:
        group.update(adam_group(adam))
        if group[VECTORS] and not adam.decay_vectors:
            group["weight_decay"] = 0.0


def adam_group(adam: AdamParams) -> dict[str, Any]:
    """Return the options under the names of torch.optim."""
    return {
        "lr": adam.learning_rate,
        "betas": (adam.beta1, adam.beta2),
        "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }
