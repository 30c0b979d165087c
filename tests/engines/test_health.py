import itertools
from typing import get_args

import pytest

from skyrl_actors.engines.health import NEXT, Event, Health, after


def test_a_restarted_engine_is_stale_before_it_is_healthy():
    health: Health = "HEALTHY"
    seen = []
    for event in ("died", "again", "started", "ready"):
        health = after(health, event)  # type: ignore[arg-type]
        seen.append(health)
    assert seen == ["DEAD", "STARTING", "STALE", "HEALTHY"]


def test_every_other_step_is_refused():
    for health, event in itertools.product(get_args(Health), get_args(Event)):
        if (health, event) not in NEXT:
            with pytest.raises(ValueError, match=f"a {health} engine can not be {event}"):
                after(health, event)


def test_only_readiness_makes_an_engine_healthy():
    assert [key for key, result in NEXT.items() if result == "HEALTHY"] == [("STALE", "ready")]
