"""Decide what follows a failed change of state (pure): the pause, and which parts restart."""

from dataclasses import dataclass, field

from skyrl_actors.supervision.backoff import pause_after

EVERYTHING_AT = 3  # consecutive failures; restarting the failed parts twice did not help


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do after a failed move."""

    pause_s: float  # before the next try
    everything: bool  # restart all parts that share the devices, not only those that failed


@dataclass(slots=True)
class Failures:
    """Failures of one move."""

    total: int = 0
    in_a_row: int = 0  # since the last success
    error: str = ""  # of the last failure


@dataclass(slots=True, kw_only=True)
class MoveHealing:
    """Retry a failed move without end. The pause doubles up to `longest_pause_s`.

    After `advise_after` consecutive failures only an operator can help; `advice` says how.
    """

    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    advise_after: int = 5
    moves: dict[str, Failures] = field(default_factory=dict[str, Failures])

    def failed(self, move: str, error: str) -> Remedy:
        failures = self.moves.setdefault(move, Failures())
        failures.total += 1
        failures.in_a_row += 1
        failures.error = error
        pause_s = pause_after(failures.in_a_row, self.first_pause_s, self.longest_pause_s)
        return Remedy(pause_s, everything=failures.in_a_row == EVERYTHING_AT)

    def succeeded(self, move: str) -> None:
        if move in self.moves:
            self.moves[move].in_a_row = 0

    def advice(self) -> str | None:
        """Return what an operator should do; None while retries may help."""
        stuck = {m: f for m, f in self.moves.items() if f.in_a_row >= self.advise_after}
        if not stuck:
            return None
        said = "; ".join(
            f"'{m}' failed {f.in_a_row} times in a row: {f.error}" for m, f in stuck.items()
        )
        return (
            f"memory cannot be moved: {said}. Accepted requests wait, and it is tried again every "
            f"{self.longest_pause_s:.0f} s. Check that nothing else uses the devices and that the "
            "host has memory; otherwise lower engine.kv_cache_bytes or policy.microbatch_tokens "
            "and restart"
        )


@dataclass(slots=True, kw_only=True)
class LoadRetries:
    """Try to load a version `attempts` times; a fault that remains belongs to the version."""

    first_pause_s: float
    longest_pause_s: float
    attempts: int
    _in_a_row: dict[str, int] = field(default_factory=dict[str, int])

    def failed(self, version: str) -> float | None:
        """Return seconds until the next try; None after the last try, which resets the count."""
        in_a_row = self._in_a_row[version] = self._in_a_row.get(version, 0) + 1
        if in_a_row >= self.attempts:
            del self._in_a_row[version]
            return None
        return pause_after(in_a_row, self.first_pause_s, self.longest_pause_s)

    def succeeded(self, version: str) -> None:
        self._in_a_row.pop(version, None)
