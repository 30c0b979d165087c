import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.shares import Shares
from skyrl_actors.messages.errors import CapacityError, Conflict


def queue_of(requests: int, num_bytes: int = 10**9, floor: int = 1) -> RequestQueue:
    return RequestQueue(
        Shares(limit=requests, floor=floor),
        Shares(limit=num_bytes, floor=floor),
    )


def accept(
    queue: RequestQueue,
    request_id: str,
    stream: str,
    seq_id: int | None,
    digest: int,
    line: str | None,
) -> None:
    queue.reserve(request_id, stream, seq_id, digest, line)
    queue.confirm(request_id)


LINES = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60)


@given(LINES)
def test_rule_1_and_2_order_within_a_model_and_independence_between_models(
    events: list[tuple[str, bool]],
):
    """Each event is a model, and whether it accepts a request or finishes the running one."""
    queue = queue_of(1000)
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
        assert not waits or model in running  # no request waits without a reason
    for model in "abc":
        assert started[model] == accepted[model][: len(started[model])]


def test_rule_3_the_same_number_is_the_same_request():
    queue = queue_of(10)
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


def test_rule_4_open_requests_are_bounded_in_number():
    queue = queue_of(2)
    accept(queue, "r1", "m", None, 0, "m")
    accept(queue, "r2", "s", None, 0, None)
    with pytest.raises(CapacityError, match="2 requests are open"):
        accept(queue, "r3", "m", None, 0, "m")
    queue.finish("r2", None)
    accept(queue, "r3", "m", None, 0, "m")
    assert queue.num_open == 2 and queue.lengths() == {"m": 2}


def test_rule_4_open_requests_are_bounded_in_bytes():
    queue = queue_of(10, num_bytes=100)
    queue.reserve("r1", "m", None, 0, "m", num_bytes=60)
    with pytest.raises(CapacityError, match="have 60 bytes, and with this one's 50"):
        queue.reserve("r2", "m", None, 0, "m", num_bytes=50)
    queue.finish("r1", "m")
    queue.reserve("r2", "m", None, 0, "m", num_bytes=50)


def key(number: int) -> str:
    """Return the end of a request id that belongs to this key."""
    return f"0k{number:010x}"


@pytest.mark.parametrize("what", ["requests", "bytes"])
def test_rule_4_two_greedy_keys_leave_capacity_for_a_third(what: str):
    requests, num_bytes = (20_000, 10**9) if what == "requests" else (10**9, 20_000 * 64)
    queue = RequestQueue(
        Shares(limit=requests, floor=16),
        Shares(limit=num_bytes, floor=16 * 64),
    )
    assert [fill(queue, number) for number in range(3)] == [10_000, 5_000, 2_500]
    late = [fill(queue, number) for number in range(3, 60)]
    assert min(late) == 16, "each key may always have some"


def fill(queue: RequestQueue, number: int) -> int:
    """Reserve requests of one key until one is refused, and return the number reserved."""
    for i in range(10**6):
        try:
            queue.reserve(f"r{number}x{i}{key(number)}", "s", None, 0, None, num_bytes=64)
        except CapacityError:
            return i
    raise AssertionError("never refused")


def test_rule_4_the_bound_of_a_key_rises_when_requests_of_another_finish():
    queue = queue_of(100)
    assert [fill(queue, 0), fill(queue, 1)] == [50, 25]
    for i in range(50):
        queue.finish(f"r0x{i}{key(0)}", None)
    with pytest.raises(CapacityError):
        for i in range(100, 200):
            queue.reserve(f"r1x{i}{key(1)}", "s", None, 0, None)
    assert queue.num_open == 50


def test_rule_5_an_unconfirmed_request_does_not_start():
    queue = queue_of(10)
    queue.reserve("r1", "m", 1, 111, "m")
    accept(queue, "r2", "m", 2, 222, "m")
    assert queue.next("m") is None and queue.head("m") == "r1"  # r2 waits behind it
    queue.confirm("r1")
    assert queue.next("m") == "r1"


def test_rule_5_a_withdrawn_request_leaves_no_trace():
    queue = queue_of(10)
    queue.reserve("r1", "m", 1, 111, "m")
    accept(queue, "r2", "m", 2, 222, "m")
    queue.withdraw("r1", "m", 1, "m")
    assert queue.known("m", 1, 999) is None and queue.num_open == 1
    assert queue.next("m") == "r2"


def test_an_unconfirmed_request_is_not_drained():
    queue = queue_of(10)
    accept(queue, "r1", "m", None, 0, "m")
    queue.reserve("r2", "m", None, 0, "m")
    assert queue.drain("m") == ["r1"] and queue.head("m") == "r2"
