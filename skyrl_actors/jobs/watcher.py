"""Who is told how a run goes, and what comes out of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_actors.jobs.rollout import Rollout


class Watcher(Protocol):
    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, metrics: dict[str, float], rollouts: Sequence[Rollout] = ()) -> None: ...

    def warned(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    metric: str
    before: float
    after: float
    steps: int
    checkpoint: str  # folder of the last weights
    best: dict[str, Any] = field(default_factory=dict[str, Any])  # step, value, folder of the best evaluation's, if kept
