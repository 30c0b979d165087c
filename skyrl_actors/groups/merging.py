"""Merge the results of all ranks of a group into the result of one call."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.results import LossOutput
from skyrl_actors.workers.interface import RowOutput


def merge_rows(columns: Columns, outputs: Sequence[RowOutput], loss: LossCall | None) -> LossOutput:
    """Merge the rows of all ranks in the order of `columns`, and add up their sums."""
    field = outputs[0].field
    predicted: NDArray[np.float32] = np.zeros(columns.shape, np.float32)
    elementwise: NDArray[np.float32] = np.zeros(columns.shape, np.float32)
    metrics: dict[str, float] = {}
    for output in outputs:
        where = columns.positions(output.rows)
        predicted[where] = output.values
        elementwise[where] = output.elementwise
        for name, value in output.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value
    metrics |= {
        name: value / columns.num_rows for name, value in metrics.items() if name.endswith(":mean")
    }
    compute_s = max(output.compute_s for output in outputs)
    metrics |= {"num_tokens:sum": float(columns.num_tokens), "compute_s:sum": compute_s}
    fields = {field: predicted}
    if loss is not None:
        fields["elementwise_loss"] = elementwise
    return LossOutput(
        offsets=columns.offsets, fields=fields, metrics=metrics, widths=columns.widths
    )
