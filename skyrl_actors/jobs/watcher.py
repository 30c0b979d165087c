"""The interface that shows the progress of a run, and the result of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyrl_actors.jobs.rollout import Rollout


class Watcher(Protocol):
    """Shows or records the progress of a run."""

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def evaluated(
        self, step: int, metrics: dict[str, float], rollouts: Sequence[Rollout] = ()
    ) -> None: ...

    def warned(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The result of a run: its metric before and after training, and its weights."""

    metric: str
    before: float
    after: float
    steps: int
    checkpoint: str  # folder of the last weights
    # step, value and folder of the best evaluation, if its weights were saved
    best: dict[str, Any] = field(default_factory=dict[str, Any])
