"""The registry of verbs, and what answered operations change in the tables of models."""

from typing import Any, get_args

import numpy as np
import pytest

from skyrl_actors.config.cluster import ClusterConfig, HttpConfig
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.tenants import Model, TenantTable
from skyrl_actors.controller.verbs import KINDS, MODEL_VERBS, SAMPLE, model_verb, verb_of
from skyrl_actors.controller.verbs.forward_backward import _check_custom
from skyrl_actors.controller.verbs.verb import AnsweredOp, ModelTables
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.journal.tables import LIFETIMES
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.model import LossCall, ModelSpec

NOW = 5.0


def tables_with(position: int, steps: int = 0) -> tuple[Model, Progress, ModelTables]:
    tenants = TenantTable()
    model = tenants.models["m"] = Model(
        spec=ModelSpec(model_id="m", base_model="tiny"),
        session_id="s",
        user_metadata={},
        ready=True,
        steps=steps,
    )
    progress = Progress(position=position, step=steps)
    return model, progress, ModelTables(tenants, {"m": progress})


def answered(number: int, effect: Any = "applied", **more: Any) -> AnsweredOp:
    fields = {"failed": False, "num_bytes": 10, "request": None, "failure": None} | more
    return AnsweredOp(number=number, effect=effect, **fields)


def batch(forward_only: bool) -> rq.ForwardBackward:
    loss = LossCall("cross_entropy", {})
    return rq.ForwardBackward(
        model_id="m",
        columns=columns_from([Example([1, 2], {})]),
        loss=loss,
        forward_only=forward_only,
    )


def test_every_kind_of_request_has_a_verb():
    kinds = {kind.__name__ for kind in get_args(rq.ModelRequest)}
    assert kinds == MODEL_VERBS.keys()
    assert (
        verb_of(rq.Sample(sampler_id="s", prompt=(1,), params=rq.SamplingParams(max_tokens=1)))
        is SAMPLE
    )


def test_the_journal_gets_the_kinds_by_the_properties_that_verbs_state():
    assert (
        Kinds(
            creates="CreateModel",
            ends="Unload",
            settles=frozenset({"OptimStep", "LoadWeights"}),
            failure_matters=frozenset({"ForwardBackward"}),
            reads_files=frozenset({"CreateModel", "LoadWeights"}),
        )
        == KINDS
    )
    assert str(LIFETIMES) == f"kind IN ('{KINDS.creates}', '{KINDS.ends}')", "of a partial index"


def test_a_kind_that_a_later_version_wrote_is_refused_by_name():
    with pytest.raises(InternalError, match="unknown kind 'MergeModels'"):
        model_verb("MergeModels")


def test_steps_that_a_snapshot_covers_are_not_counted_again():
    model, progress, tables = tables_with(position=7, steps=2)
    for number in (5, 7, 9):
        model_verb("OptimStep").fold(model, answered(number), tables, NOW)
    assert (model.steps, progress.step, progress.position, progress.operations) == (3, 3, 9, 1)


def test_a_dropped_step_moves_the_position_but_is_no_step():
    model, progress, tables = tables_with(position=3)
    model.incomplete = "out of memory"
    dropped = answered(4, "dropped", failed=True, failure="refused")
    model_verb("OptimStep").fold(model, dropped, tables, NOW)
    assert (model.steps, progress.position, model.incomplete) == (0, 4, None)


@pytest.mark.parametrize(
    ("request_", "incomplete"),
    [(batch(False), "boom"), (batch(True), None), (None, "boom")],
    ids=["training", "forward_only", "unreadable"],
)
def test_a_failed_batch_makes_the_pending_gradients_incomplete(
    request_: Any, incomplete: str | None
):
    model, progress, tables = tables_with(position=3)
    failed = answered(4, "none", failed=True, request=request_, failure="boom")
    model_verb("ForwardBackward").fold(model, failed, tables, NOW)
    assert (model.incomplete, progress.position) == (incomplete, 3)


@pytest.mark.parametrize("failed", [False, True])
def test_an_unloaded_model_is_gone_also_when_the_ranks_failed_to_delete_it(failed: bool):
    model, _, tables = tables_with(position=3)
    model_verb("Unload").fold(model, answered(4, "none", failed=failed), tables, NOW)
    assert not tables.tenants.models and not tables.progress


def test_a_model_whose_creation_failed_is_gone():
    model, _, tables = tables_with(position=3)
    model_verb("CreateModel").fold(model, answered(3, "none", failed=True), tables, NOW)
    assert not tables.tenants.models and not tables.progress


def test_a_custom_loss_needs_whole_rows():
    """Its graph may use positions without regard to weights, which padding has."""
    fields: dict[str, Any] = {"target_tokens": np.asarray([3, 4])}
    columns = columns_from([Example(np.asarray([1, 2, 3], np.int32), fields)])
    assert columns.fronts is not None
    with pytest.raises(InvalidRequest, match="one value of each loss_fn_input for each token"):
        _check_custom(
            LossCall("custom", {"loss_id": "x"}),
            columns,
            ClusterConfig(http=HttpConfig(sdk={"custom_loss_server_side": True})),
        )
