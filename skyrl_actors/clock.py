"""The time of day for what expires: it does not follow the system clock when that is set while the process runs.

Lifetimes and retention compare times of day, as these outlive a process. A clock that is set forward would make
everything old at once; one that is set back would keep everything. So the time is read once, when the process
starts, and from then on it advances with a clock that cannot be set.
"""

import time
from collections.abc import Callable


def _elapsed() -> float:
    """Seconds since the machine started. Linux counts the time that it was suspended too."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SteadyClock:
    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed):
        self._elapsed = elapsed
        self._offset = wall() - elapsed()

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self._elapsed() + self._offset


now = SteadyClock()
