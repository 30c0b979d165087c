"""One model's rows in a call, and their results."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from skyrl_actors.losses import REGISTRY
from skyrl_actors.losses.gspo import SEQUENCE_RATIO_MASK
from skyrl_actors.losses.loss import ENTROPY_COEF
from skyrl_actors.losses.processing import Processing, processing_of
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.example import WEIGHTS
from skyrl_actors.messages.model import LossCall
from skyrl_actors.workers.models import TrainedModel


@dataclass(kw_only=True)
class PassPart:
    """One model's rows in a call, and their results."""

    model: TrainedModel
    columns: Columns
    rows: tuple[int, ...]
    loss: LossCall | None  # None: a critic's plain forward
    predicted: np.ndarray = field(init=False)  # float32 of columns.shape, at flat positions
    elementwise: np.ndarray = field(init=False)
    sums: dict[str, float] = field(init=False)
    refused: str | None = None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset the results."""
        self.predicted = np.zeros(self.columns.shape, np.float32)
        self.elementwise = np.zeros(self.columns.shape, np.float32)
        self.sums = {}

    def in_row_order(self) -> tuple[np.ndarray, np.ndarray]:
        where = self.columns.positions(self.rows)
        return self.predicted[where], self.elementwise[where]

    @property
    def num_targets(self) -> int:
        """The number of targets a token, K; 0 for a single target without the axis."""
        return 0 if self.columns.widths is None else self.columns.shape[1]

    def own_targets(self, x: Tensor) -> Tensor:
        """Return the targets of this part from a tensor with more targets a token."""
        if x.ndim == 1:
            return x
        return x[:, : self.num_targets] if self.num_targets else x[:, 0]

    @property
    def entropy_coef(self) -> float:
        return float(self.loss.config.get(ENTROPY_COEF, 0.0)) if self.loss else 0.0

    @property
    def processing(self) -> Processing | None:
        """The distribution that the loss is about; None for the model's own."""
        return processing_of(self.loss.config) if self.loss else None

    def counted(self, where: np.ndarray) -> np.ndarray:
        """Return [n] bool: the positions whose weight is not 0.

        A loss without weights, or with inputs of its own, counts all positions.
        """
        weights = self.columns.fields.get(WEIGHTS)
        if self.loss is None or weights is None or REGISTRY[self.loss.name].any_inputs:
            return np.ones(len(where), bool)
        own = weights[where] != 0
        return own if own.ndim == 1 else own.any(1)

    def scored(self, where: np.ndarray) -> np.ndarray:
        """Return [n] bool: the positions whose logprobs the loss reads.

        The ratio of a sequence also covers tokens whose weight is 0.
        """
        counted, mask = self.counted(where), self.columns.fields.get(SEQUENCE_RATIO_MASK)
        if mask is None or counted.all():  # also of a custom loss, whose inputs have any shape
            return counted
        return counted | (mask[where] != 0)
