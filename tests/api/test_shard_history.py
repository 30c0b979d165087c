"""The totals of each minute of a service with several shards."""

from itertools import pairwise

from skyrl_actors.api.shard_answers import history
from skyrl_actors.messages.operating import HistoryPoint


def points(first_at: float, before: float, count: int) -> list[HistoryPoint]:
    """Return a shard's points: 1,000 tokens a minute after `before`."""
    return [
        HistoryPoint(
            at=first_at + 60 * n,
            trained_tokens=before + 1000 * n,
            sampled_tokens=0,
            failed=0,
            open_requests=1,
        )
        for n in range(count)
    ]


def test_a_shard_that_ran_before_does_not_look_like_a_surge():
    """The shards keep their points at different seconds of a minute."""
    found = history({1: points(50, 5e6, 5), 2: points(70, 2e6, 5)}, ())
    totals = [point.trained_tokens for point in found]
    assert [b - a for a, b in pairwise(totals)] == [
        1000,
        2000,
        2000,
        2000,
        1000,
    ]
    assert [point.at for point in found] == [50, 110, 170, 230, 290, 310]


def test_a_shard_that_is_silent_counts_with_its_last_point():
    found = history({1: points(50, 0, 4), 2: points(50, 10, 2), 3: []}, ())
    assert [point.trained_tokens for point in found] == [10, 2010, 3010, 4010]
