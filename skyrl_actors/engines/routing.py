"""Which engine takes a sample (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    in_flight: int
    waiting: int
    holds_version: bool  # the full weights the sample needs are loaded


def choose(loads: Sequence[EngineLoad]) -> int:
    """The least busy engine that holds the weights; if none does, the least busy one. Ties go to the lowest index."""
    return min(range(len(loads)), key=lambda i: (not loads[i].holds_version, loads[i].in_flight + loads[i].waiting, i))
