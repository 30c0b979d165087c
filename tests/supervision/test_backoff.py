import pytest

from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.supervision import backoff
from skyrl_actors.supervision.backoff import RestartLimit


def test_pauses_double_until_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backoff, "MAX_BACKOFF_S", 3.0)
    limit = RestartLimit(RestartConfig(max_in_a_row=5))
    assert [limit.died(0.0) for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, None]


def test_a_success_ends_the_row():
    limit = RestartLimit(RestartConfig(max_in_a_row=1))
    assert limit.died(0.0) == 0.0
    limit.succeeded()
    assert limit.died(0.0) == 0.0
    assert limit.died(0.0) is None


def test_deaths_that_are_far_apart_start_a_new_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backoff, "MAX_BACKOFF_S", 10.0)
    limit = RestartLimit(RestartConfig(max_in_a_row=1, start_timeout_s=100))
    assert limit.died(0.0) == 0.0
    assert limit.died(171.0) == 0.0
    assert limit.died(300.0) is None


def test_a_new_try_is_allowed_after_the_cooldown():
    limit = RestartLimit(RestartConfig(max_in_a_row=1))
    assert limit.may_try_again(0.0)
    limit.died(0.0)
    assert limit.died(10.0) is None
    assert not limit.may_try_again(69.0)
    assert limit.may_try_again(70.0) and limit.died(70.0) == 0.0
