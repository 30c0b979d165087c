"""How long a session has been silent, in a time that stands still while no client is heard (pure).

When nobody is heard, it is the way to the service that is down, and not all clients at once.
"""

LONGEST_GAP_S = 15.0  # clients send a heartbeat every 10 s, so with any client alive there is no longer gap


class SilenceClock:
    """Advances with the caller's clock, but by at most `LONGEST_GAP_S` beyond the last sign of any client."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._last: float | None = None

    def hear(self, now: float) -> float:
        """A client is heard. Returns the time of this clock."""
        self._passed = self.at(now)
        self._last = now
        return self._passed

    def at(self, now: float) -> float:
        return self._passed if self._last is None else self._passed + min(now - self._last, LONGEST_GAP_S)
