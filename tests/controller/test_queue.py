import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.messages.errors import CapacityError, Conflict


def accept(queue: RequestQueue, request_id: str, stream: str, seq_id: int | None, digest: int, line: str | None) -> None:
    queue.reserve(request_id, stream, seq_id, digest, line)
    queue.confirm(request_id)


LINES = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60)


@given(LINES)
def test_rule_1_and_2_order_within_a_model_and_independence_between_models(events: list[tuple[str, bool]]):
    """Each event: a model, and whether it accepts a request or finishes the one that runs."""
    queue = RequestQueue(1000, 1000)
    accepted: dict[str, list[str]] = {m: [] for m in "abc"}
    started: dict[str, list[str]] = {m: [] for m in "abc"}
    running: dict[str, str] = {}
    for i, (model, accepts) in enumerate(events):
        if accepts:
            accept(queue, f"r{i}", model, None, 0, model)
            accepted[model].append(f"r{i}")
        elif model in running:
            queue.finish(running.pop(model), model)
        request_id = queue.next(model)
        if request_id is not None:
            assert model not in running
            running[model] = request_id
            started[model].append(request_id)
        waits = len(accepted[model]) > len(started[model])
        assert not waits or model in running  # nobody waits without a reason
    for model in "abc":
        assert started[model] == accepted[model][: len(started[model])]


def test_rule_3_the_same_number_is_the_same_request():
    queue = RequestQueue(10, 10)
    accept(queue, "r1", "m", 1, 111, "m")
    assert queue.known("m", 1, 111) == "r1"
    assert queue.known("m", 2, 111) is None
    assert queue.known("other", 1, 111) is None
    assert queue.known("m", None, 111) is None
    with pytest.raises(Conflict, match="sequence number 1 was used before"):
        queue.known("m", 1, 222)
    queue.finish(queue.next("m") or "", "m")
    assert queue.known("m", 1, 111) == "r1"  # also after it was answered
    queue.forget("m")
    assert queue.known("m", 1, 111) is None


def test_rule_4_the_bound():
    queue = RequestQueue(2, 2)
    accept(queue, "r1", "m", None, 0, "m")
    accept(queue, "r2", "s", None, 0, None)
    with pytest.raises(CapacityError, match="2 requests are open"):
        accept(queue, "r3", "m", None, 0, "m")
    queue.finish("r2", None)
    accept(queue, "r3", "m", None, 0, "m")
    assert queue.num_open == 2 and queue.lengths() == {"m": 2}


def test_rule_5_what_is_not_written_does_not_start():
    queue = RequestQueue(10, 10)
    queue.reserve("r1", "m", 1, 111, "m")
    accept(queue, "r2", "m", 2, 222, "m")
    assert queue.next("m") is None and queue.head("m") == "r1"  # r2 waits behind it
    queue.confirm("r1")
    assert queue.next("m") == "r1"


def test_rule_5_what_could_not_be_written_never_came():
    queue = RequestQueue(10, 10)
    queue.reserve("r1", "m", 1, 111, "m")
    accept(queue, "r2", "m", 2, 222, "m")
    queue.withdraw("r1", "m", 1, "m")
    assert queue.known("m", 1, 999) is None and queue.num_open == 1
    assert queue.next("m") == "r2"


def test_what_is_being_written_is_not_drained():
    queue = RequestQueue(10, 10)
    accept(queue, "r1", "m", None, 0, "m")
    queue.reserve("r2", "m", None, 0, "m")
    assert queue.drain("m") == ["r1"] and queue.head("m") == "r2"
