"""A clock for the silence of sessions that stops while no client reaches the service (pure).

When no client reaches the service, the network is down, and not all clients at once.
"""

# Clients send a heartbeat every 10 s, so with any live client the gap is not longer.
LONGEST_GAP_S = 15.0


class SilenceClock:
    """A clock that runs for at most `LONGEST_GAP_S` after the last sign of life of any client."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._last: float | None = None

    def mark_active(self, now: float) -> float:
        """Record a sign of life of any client. Returns the time of this clock."""
        self._passed = self.at(now)
        self._last = now
        return self._passed

    def at(self, now: float) -> float:
        """Return the time of this clock at the caller's time `now`."""
        return (
            self._passed
            if self._last is None
            else self._passed + min(now - self._last, LONGEST_GAP_S)
        )
