"""The results of ranks become the result of a call, in the order of its rows."""

import numpy as np

from skyrl_actors.groups.merging import merge_rows
from skyrl_actors.messages.columns import Columns, offsets_of
from skyrl_actors.messages.model import LossCall
from skyrl_actors.workers.interface import RowOutput

COLUMNS = Columns(tokens=np.arange(6, dtype=np.int32), offsets=offsets_of((1, 2, 3)), fields={})


def output(rows: tuple[int, ...], sums: dict[str, float], seconds: float) -> RowOutput:
    values = COLUMNS.positions(rows).astype(np.float32)
    return RowOutput(
        rows=rows,
        field="logprobs",
        values=values,
        elementwise=-values,
        sums=sums,
        compute_s=seconds,
    )


def test_rows_return_to_their_places_and_sums_add_up():
    merged = merge_rows(
        COLUMNS,
        [
            output((0, 2), {"loss:sum": 1.0, "ratio:mean": 3.0}, 0.5),
            output((1,), {"loss:sum": 2.0, "ratio:mean": 6.0}, 2.0),
        ],
        LossCall("cross_entropy", {}),
    )
    assert merged.fields["logprobs"].tolist() == [0, 1, 2, 3, 4, 5]
    assert merged.fields["elementwise_loss"].tolist() == [0, -1, -2, -3, -4, -5]
    assert merged.metrics == {
        "loss:sum": 3.0,
        "ratio:mean": 3.0,  # of three rows
        "num_tokens:sum": 6.0,
        "compute_s:sum": 2.0,  # the slowest rank
    }


def test_a_call_without_a_loss_has_no_loss_of_each_token():
    merged = merge_rows(COLUMNS, [output((0, 1, 2), {}, 1.0)], None)
    assert set(merged.fields) == {"logprobs"}
