"""What follows a failed change of state (pure): how soon it is tried again, and how much is made anew before that."""

from dataclasses import dataclass, field

EVERYTHING_AT = 3  # failures in a row: what failed was made anew twice, and that did not help


@dataclass(frozen=True, slots=True)
class Remedy:
    pause_s: float  # until the next try
    everything: bool  # make anew all that shares the devices, and not only what failed


@dataclass(slots=True)
class Failures:
    """Of one move."""

    total: int = 0
    in_a_row: int = 0  # since it last succeeded
    error: str = ""  # the last one


def pause_after(in_a_row: int, first_s: float, longest_s: float) -> float:
    """Doubles with each failure."""
    return min(first_s * 2 ** min(in_a_row - 1, 60), longest_s)


@dataclass(slots=True)
class MoveHealing:
    """A failed move is tried again without end, with a pause that doubles up to `longest_pause_s`.

    After `advise_after` failures in a row only an operator can help: `advice` names what to do.
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
        """What an operator should know and do; None while the service can help itself."""
        stuck = {m: f for m, f in self.moves.items() if f.in_a_row >= self.advise_after}
        if not stuck:
            return None
        said = "; ".join(f"'{m}' failed {f.in_a_row} times in a row: {f.error}" for m, f in stuck.items())
        return (
            f"memory can not be moved: {said}. Accepted requests wait, and it is tried again every "
            f"{self.longest_pause_s:.0f} s. See that nothing else uses the devices and that the host has "
            "memory; else lower engine.kv_cache_bytes or policy.microbatch_tokens and restart"
        )


@dataclass(slots=True)
class LoadRetries:
    """Loading a version of weights into an engine is tried `attempts` times: a fault that stays is the version's own."""

    first_pause_s: float
    longest_pause_s: float
    attempts: int
    _in_a_row: dict[str, int] = field(default_factory=dict[str, int])

    def failed(self, version: str) -> float | None:
        """Seconds until the next try; None when there is none, and the count begins anew."""
        in_a_row = self._in_a_row[version] = self._in_a_row.get(version, 0) + 1
        if in_a_row >= self.attempts:
            del self._in_a_row[version]
            return None
        return pause_after(in_a_row, self.first_pause_s, self.longest_pause_s)

    def succeeded(self, version: str) -> None:
        self._in_a_row.pop(version, None)
