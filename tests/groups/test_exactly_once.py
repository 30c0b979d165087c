import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.groups.exactly_once import ExactlyOnce
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.workers.interface import TORN, PartCall, Refused


class Adder:
    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.fail: Exception | None = None

    def create_model(self, model_id: str) -> str:
        self.sums[model_id] = 0
        return "made"

    def add(self, model_id: str, value: int) -> int:
        self.sums[model_id] += value
        if self.fail:
            raise self.fail
        return self.sums[model_id]

    optim_step = add

    def read(self, model_id: str) -> int:
        return self.sums[model_id]

    def delete_model(self, model_id: str) -> None:
        del self.sums[model_id]


def made() -> tuple[ExactlyOnce, Adder]:
    worker = Adder()
    once = ExactlyOnce(worker)
    once.apply(1, "m", OpPrecondition(1), "create_model", "m")
    return once, worker


@given(st.lists(st.integers(1, 3), max_size=30))
def test_a_repeated_operation_changes_nothing_and_returns_the_first_result(repeats: list[int]):
    once, worker = made()
    for number, times in enumerate(repeats, start=2):
        assert {
            once.apply(1, "m", OpPrecondition(number, number - 1), "add", "m", 1)
            for _ in range(times)
        } == {number - 1}
    assert worker.sums["m"] == len(repeats)


def test_both_parts_of_an_operation_are_applied():
    """A model that is created from a checkpoint is created and then filled, under one number."""
    once, worker = made()
    assert once.apply(1, "m", OpPrecondition(1, 1), "add", "m", 7) == 7
    assert once.apply(1, "m", OpPrecondition(1, 1), "add", "m", 7) == 7  # a repetition
    # It restarts from the first part.
    assert once.apply(1, "m", OpPrecondition(1), "create_model", "m") == "made"
    assert once.apply(1, "m", OpPrecondition(1, 1), "add", "m", 7) == 7 and worker.sums["m"] == 7


@pytest.mark.parametrize(
    "precondition",
    [
        OpPrecondition(4, 3),
        OpPrecondition(6, 1),
        OpPrecondition(9, 7),
        OpPrecondition(None, 1),
        OpPrecondition(None, 6),
    ],
)
def test_an_operation_on_another_state_is_refused(precondition: OpPrecondition):
    """Steps and reads both require the expected state, whatever the controller has recorded."""
    once, worker = made()
    once.apply(1, "m", OpPrecondition(5, 1), "add", "m", 1)
    message = f"m is at operation 5, but the call requires operation {precondition.after}"
    with pytest.raises(StateLost, match=message):
        once.apply(
            1,
            "m",
            precondition,
            *(("read", "m") if precondition.number is None else ("add", "m", 1)),
        )
    assert worker.sums["m"] == 1 and once.apply(1, "m", OpPrecondition(None, 5), "read", "m") == 1


def test_a_torn_model_rejects_calls_until_it_is_rebuilt():
    once, worker = made()
    worker.fail = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        once.apply(1, "m", OpPrecondition(2, 1), "add", "m", 1)
    worker.fail = None
    for number, method in ((2, "add"), (None, "read")):
        with pytest.raises(StateLost, match="holds no complete state of m"):
            once.apply(
                1, "m", OpPrecondition(number, 1), method, "m", *([1] if method == "add" else [])
            )
    # A torn model occupies memory, so a new controller must learn of it.
    assert once.adopt(1) == {"m": TORN}
    once.apply(1, "m", OpPrecondition(1), "create_model", "m")
    assert once.apply(1, "m", OpPrecondition(2, 1), "add", "m", 1) == 1


def test_a_clean_refusal_counts_as_a_result():
    once, worker = made()
    worker.fail = InvalidRequest("gradient norm is nan")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="gradient norm"):
            once.apply(1, "m", OpPrecondition(2, 1), "optim_step", "m", 0)
    worker.fail = None
    assert once.adopt(1) == {"m": 2}


def test_an_older_epoch_is_fenced_off():
    once, _ = made()
    assert once.adopt(3) == {"m": 1}
    for call in (
        lambda: once.adopt(2),
        lambda: once.apply(2, "m", OpPrecondition(2, 1), "add", "m", 1),
        lambda: once.delete(2, "m"),
    ):
        with pytest.raises(InternalError, match=r"epoch 2 is over: a newer controller \(3\)"):
            call()
    once.delete(3, "m")
    with pytest.raises(StateLost):
        once.apply(3, "m", OpPrecondition(2, 1), "add", "m", 1)


class Tenants(Adder):
    def forward_backward(self, calls: tuple[PartCall, ...], forward_only: bool) -> list:
        self.asked = [call.model_id for call in calls]
        found = []
        for call in calls:
            if call.rows == (13,):
                found.append(Refused(InvalidRequest("no"), clean=True))
                continue
            self.sums[call.model_id] += len(call.rows)
            found.append(self.sums[call.model_id])
            if call.rows == (14,):
                found[-1] = Refused(InvalidRequest("half"), clean=False)
        if self.fail:
            raise self.fail
        return found


def part(model_id: str, *rows: int) -> PartCall:
    return PartCall(
        model_id=model_id,
        rows=rows,
        columns=columns_from([Example(np.ones(1, np.int32), {})]),
        loss=None,
    )


def tenants(*names: str) -> tuple[ExactlyOnce, Tenants]:
    worker = Tenants()
    once = ExactlyOnce(worker)
    for name in names:
        once.apply(1, name, OpPrecondition(1), "create_model", name)
    return once, worker


def test_parts_of_many_models_are_each_applied_once():
    once, worker = tenants("a", "b")
    calls = [part("a", 0, 1), part("b", 0), part("c", 0)]
    first = once.forward_backward(
        1, [OpPrecondition(2, 1), OpPrecondition(3, 1), OpPrecondition(4, 1)], calls, False
    )
    assert first[:2] == [2, 1] and isinstance(first[2], StateLost)
    again = once.forward_backward(1, [OpPrecondition(2, 1), OpPrecondition(5, 3)], calls[:2], False)
    assert again == [2, 2] and worker.asked == ["b"] and worker.sums == {"a": 2, "b": 2}
    assert once.adopt(1) == {"a": 2, "b": 5}


def test_a_refused_part_leaves_its_model_unchanged_or_torn():
    once, _ = tenants("a", "b", "c")
    preconditions = [OpPrecondition(2, 1), OpPrecondition(3, 1), OpPrecondition(4, 1)]
    outcomes = once.forward_backward(
        1, preconditions, [part("a", 13), part("b", 14), part("c", 0)], False
    )
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest, InvalidRequest, int]
    assert once.adopt(1) == {"a": 1, "b": TORN, "c": 4}
    once.delete(1, "b")
    assert once.adopt(1) == {"a": 1, "c": 4}


def test_a_failed_call_tears_all_its_models_and_no_other():
    once, worker = tenants("a", "b", "c")
    worker.fail = InternalError("broken")
    with pytest.raises(InternalError):
        once.forward_backward(
            1, [OpPrecondition(2, 1), OpPrecondition(3, 1)], [part("a", 0), part("b", 0)], False
        )
    assert once.adopt(1) == {"a": TORN, "b": TORN, "c": 1}


def test_reading_tears_nothing():
    once, worker = tenants("a")
    worker.fail = InternalError("broken")
    with pytest.raises(InternalError):
        once.forward_backward(1, [OpPrecondition(None, 1)], [part("a", 0)], True)
    assert once.adopt(1) == {"a": 1}
