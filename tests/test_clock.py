"""The clock for expiry: it advances with elapsed seconds when the system clock is set."""

import time

from skyrl_actors import clock


def test_the_time_advances_with_elapsed_seconds_and_not_with_the_system_clock():
    wall, elapsed = [1000.0], [5.0]
    now = clock.SteadyClock(lambda: wall[0], lambda: elapsed[0])
    assert now() == 1000.0
    wall[0] += 10 * 365 * 24 * 3600
    assert now() == 1000.0
    wall[0] = -1e9
    elapsed[0] += 60
    assert now() == 1060.0


def test_the_clock_starts_at_the_time_of_day():
    assert abs(clock.now() - time.time()) < 3600
