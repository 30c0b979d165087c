"""Give the time of day for expiry, independent of later changes of the system clock.

Lifetimes and retention compare times of day, because these outlive a process. A clock set forward
would expire all objects at once; a clock set back would keep them all. So the time is read once,
when the process starts. From then on it advances with a clock that cannot be set.
"""

import time
from collections.abc import Callable


def _elapsed() -> float:
    """Return seconds since the machine started. Linux also counts suspended time."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SteadyClock:
    """A time of day that advances with `elapsed`, whatever happens to the system clock."""

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed
    ):
        self._elapsed = elapsed
        self._offset = wall() - elapsed()

    def __call__(self) -> float:
        """Return seconds since the epoch."""
        return self._elapsed() + self._offset


now = SteadyClock()
