"""Groups finish in any order: no batch exceeds the bound, and no group is lost or used twice."""

from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.jobs.staleness import Window


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
    st.floats(0, 0.6),
    st.floats(0, 0.5),
)
def test_no_batch_is_older_than_the_bound(
    prompts, bound, iterations, rng, dropped_share, fewer_share
):
    """An iteration takes a batch, trains on it while other groups begin, and publishes weights.

    The groups that begin meanwhile use the weights from before the iteration.
    """
    window = Window(prompts, bound, 0, iterations)
    running: list[int] = []
    learned: list[int] = []
    dropped: set[int] = set()
    began: dict[int, int] = {}
    taken = weights = 0
    while taken < iterations:
        while window.may_begin(weights) and rng.random() < 0.9:
            group = len(began)
            window.began(group, weights)
            began[group] = weights
            running.append(group)
        assert len(window.open) <= prompts * (bound + 1)
        if weights < taken and rng.random() < 0.3:
            weights += 1
        fewer = not running and rng.random() < fewer_share
        batch = window.take(with_fewer=fewer) if weights == taken else None
        if batch is not None:
            assert len(batch) == prompts or fewer
            assert all(taken - began[group] <= bound for group in batch)
            learned += batch
            taken += 1
        elif running:
            group = running.pop(rng.randrange(len(running)))
            if rng.random() < dropped_share:
                window.dropped(group)
                dropped.add(group)
            else:
                window.finished(group)
        else:
            assert weights < taken or window.may_begin(weights)  # otherwise it waits forever
    assert len(learned) == len(set(learned)) <= prompts * iterations
    assert set(learned) | dropped | set(window.open) == set(began) and (
        fewer_share or not window.open
    )  # every group that began had an iteration left


def test_a_batch_waits_for_groups_that_would_become_too_old():
    window = Window(1, 1, 0, 10)
    window.began(0, 0)
    window.began(1, 0)
    assert not window.may_begin(0)
    window.finished(1)
    assert window.take() == [1]
    assert not window.may_begin(0) and window.may_begin(1)
    window.began(2, 1)
    window.finished(2)
    assert window.take() is None  # group 0 began at version 0, and this batch begins at version 1
    window.finished(0)
    assert window.take() == [0] and window.take() == [2]


def test_a_batch_can_be_smaller_if_the_filter_leaves_too_few():
    window = Window(2, 1, 0, 10)
    for group in range(3):
        window.began(group, 0)
    window.finished(0)
    window.dropped(1)
    assert window.take() is None and window.take(with_fewer=True) == [0] and window.open == [2]
