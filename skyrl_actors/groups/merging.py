"""Merge the results of all ranks of a group into the result of one call."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.results import LossOutput
from skyrl_actors.workers.interface import RowOutput


def merge_ranks(found: Sequence[Any]) -> list[Any]:
    """Merge the row outputs of several ranks into those of the first; the others become None.

    `found` has for each rank one output for each part, or the error of the rank or of a part, or
    None. With an error, nothing is merged, so that each error keeps its rank.
    """
    of_ranks = [of_rank for of_rank in found if of_rank is not None]
    if any(isinstance(of_rank, BaseException) for of_rank in of_ranks) or any(
        isinstance(part, BaseException) for of_rank in of_ranks for part in of_rank
    ):
        return list(found)
    merged = [_joined(outputs) for outputs in zip(*of_ranks, strict=True)]
    return [merged, *[None] * (len(found) - 1)]


def _joined(outputs: Sequence[RowOutput]) -> RowOutput:
    return RowOutput(
        rows=tuple(row for output in outputs for row in output.rows),
        field=outputs[0].field,
        values=np.concatenate([output.values for output in outputs]),
        elementwise=np.concatenate([output.elementwise for output in outputs]),
        sums=_added(outputs),
        compute_s=max(output.compute_s for output in outputs),
    )


def _added(outputs: Sequence[RowOutput]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for output in outputs:
        for name, value in output.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def merge_rows(columns: Columns, outputs: Sequence[RowOutput], loss: LossCall | None) -> LossOutput:
    """Merge the rows of all ranks in the order of `columns`, and add up their sums."""
    field = outputs[0].field
    predicted: NDArray[np.float32] = np.zeros(columns.shape, np.float32)
    elementwise: NDArray[np.float32] = np.zeros(columns.shape, np.float32)
    metrics = _added(outputs)
    for output in outputs:
        where = columns.positions(output.rows)
        predicted[where] = output.values
        elementwise[where] = output.elementwise
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
