"""The time that engines take to get weights: for status, traces, counters and shared deliveries."""

import statistics
import time

from skyrl_actors.observe.counts import COUNTS
from skyrl_actors.observe.spans import SPANS, Span

KEPT = 100
# The part of a usual load for which an engine waits for others that load the same version.
PAUSE_SHARE = 0.1
MAX_PAUSE_S = 1.0


class LoadTimes:
    """The seconds of the newest loads of full weights."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def loaded(self, version: str, engine: str, took: float, num_bytes: int) -> None:
        self.seconds = [*self.seconds[1 - KEPT :], took]
        record_transfer(f"{version} to {engine}", took, num_bytes)

    @property
    def pause_s(self) -> float:
        """How long an engine waits for others before it loads alone."""
        return min(MAX_PAUSE_S, PAUSE_SHARE * statistics.median(self.seconds[-10:] or [0.0]))


def record_transfer(what: str, took: float, num_bytes: int) -> None:
    """Add a transfer to the traces and counters of this process."""
    SPANS.add(
        Span(
            name=what,
            row="transfers",
            began=time.time() - took,
            seconds=took,
            attributes={"bytes": num_bytes},
        )
    )
    COUNTS.add("transfers")
    COUNTS.add("transfer_seconds", took)
    COUNTS.add("transfer_bytes", num_bytes)
