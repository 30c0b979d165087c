"""Pauses that double, and a limit of restarts in a row (pure)."""

from skyrl_actors.config.restart import RestartConfig

BACKOFF_S = 0.5  # before the second restart in a row; doubles each time
MAX_BACKOFF_S = 30.0
COOLDOWN_S = 60.0  # an actor that was given up is started again on the first request after this


def pause_after(in_a_row: int, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds after `in_a_row` failures. It doubles with each failure."""
    return min(first_s * 2 ** min(in_a_row - 1, 60), longest_s)


class RestartLimit:
    """Count deaths in a row. A row ends when a process runs for `COOLDOWN_S`."""

    def __init__(self, config: RestartConfig):
        self._config = config
        self.in_a_row = 0
        self._given_up_at: float | None = None
        self._died_at: float | None = None

    def died(self, now: float) -> float | None:
        """Return the seconds to wait before the next try, or None when there is none."""
        if self._died_at is not None and now - self._died_at > self._longest_row_s():
            self.in_a_row = 0
        self._died_at = now
        if self.in_a_row >= self._config.max_in_a_row:
            self._given_up_at = now
            return None
        self.in_a_row += 1
        if self.in_a_row == 1:
            return 0.0
        return pause_after(self.in_a_row - 1, BACKOFF_S, MAX_BACKOFF_S)

    def _longest_row_s(self) -> float:
        """Return the seconds between two deaths beyond which a new row begins."""
        return self._config.start_timeout_s + MAX_BACKOFF_S + COOLDOWN_S

    def succeeded(self) -> None:
        self.in_a_row = 0
        self._given_up_at = None

    def may_try_again(self, now: float) -> bool:
        """Return whether to try again. After `COOLDOWN_S`, a new row of tries is allowed."""
        if self._given_up_at is None:
            return True
        if now - self._given_up_at < COOLDOWN_S:
            return False
        self.in_a_row = 0
        self._given_up_at = None
        return True
