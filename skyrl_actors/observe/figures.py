"""Numbers that several displays show, computed in one place (pure). The displays only render them.

Displays are the tables of the command line, the console, traces, reports and exported metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeriod:
    """The time of one phase, as Unix times."""

    phase: str
    entered: float  # its moves began
    begun: float  # its moves ended
    ended: float  # the moves to the next phase began

    @property
    def seconds(self) -> float:
        """The time in the phase, without moves."""
        return max(self.ended - self.begun, 0.0)


def phase_periods(timeline: Sequence[Mapping[str, Any]], until: float) -> list[PhasePeriod]:
    """Return the periods of `phase_timeline` of a status. The last one lasts `until` now.

    An entry is {at, phase, seconds, moves}, oldest first.
    """
    ends = [*(float(entry["at"]) for entry in timeline[1:]), until]
    return [
        PhasePeriod(
            phase=str(entry["phase"]),
            entered=float(entry["at"]),
            begun=float(entry["at"]) + float(entry["seconds"]),
            ended=ended,
        )
        for entry, ended in zip(timeline, ends, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Ends:
    """The first and the last value of a metric of a run."""

    first: Any
    last: Any


def ends_of(metric: str, history: Sequence[Mapping[str, Any]]) -> Ends | None:
    """Return the first and the last value in the rows of a run; None if no row has the metric."""
    values = [row[metric] for row in history if metric in row]
    return Ends(values[0], values[-1]) if values else None
