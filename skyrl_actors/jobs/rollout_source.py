"""Sample rollouts for tasks, count them, and filter prompts without spread.

All schedules use this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_actors.config.job import RlConfig
from skyrl_actors.jobs.answers import Newest
from skyrl_actors.jobs.environment import Task, TaskSet
from skyrl_actors.jobs.episodes import EpisodeRunner, Rollouts
from skyrl_actors.jobs.reduction import varied
from skyrl_actors.jobs.rollout import Rollout
from skyrl_actors.messages.requests import SamplingParams

COUNTED = (
    "episodes_failed",
    "prompts_too_long",
    "prompts_without_spread",
    "batches_drawn",
    "sampled_tokens",
)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The rollouts of one iteration, and metrics of how they were sampled."""

    rollouts: list[Rollout]
    metrics: dict[str, float]


def params_of(config: RlConfig, num_samples: int, temperature: float) -> SamplingParams:
    """Return the sampling parameters of a job.

    A correction compares trainer and engine in the distribution that was sampled from. It
    therefore also needs the logprobs of that distribution.
    """
    return SamplingParams(
        max_tokens=config.max_tokens,
        num_samples=num_samples,
        temperature=temperature,
        top_k=config.top_k or -1,
        top_p=config.top_p,
        stop=config.stop or None,
        stop_at_end_too=bool(config.stop),
        processed_logprobs=temperature > 0
        and (config.processed_logprobs or config.correction.type != "none"),
    )


def distribution(config: RlConfig) -> dict[str, float | str]:
    """Return the options of a loss for the distribution that a job trains in."""
    if not config.processed_logprobs:
        return {}
    return {
        "temperature": config.temperature,
        "top_k": float(config.top_k),
        "top_p": config.top_p,
    }


class RolloutCounts:
    """Counts of the episodes since the last batch."""

    def __init__(self) -> None:
        self.by_name = dict.fromkeys(COUNTED, 0)
        self.rollouts: list[Rollout] = []

    def add(self, drawn: Rollouts) -> None:
        self.by_name["episodes_failed"] += drawn.failures.total()
        self.by_name["prompts_too_long"] += drawn.long_prompts
        self.by_name["sampled_tokens"] += sum(int(r.sampled.sum()) for r in drawn.rollouts)

    def metrics(self) -> dict[str, float]:
        found = {name: float(value) for name, value in self.by_name.items()}
        if not self.rollouts:
            return found
        return found | {
            "reward": float(np.mean([r.reward for r in self.rollouts])),
            "answer_tokens": float(np.mean([int(r.sampled.sum()) for r in self.rollouts])),
            "cut_share": float(np.mean([r.cut for r in self.rollouts])),
            "turns": float(np.mean([r.turns for r in self.rollouts])),
        }


class RolloutSource:
    """Samples batches of rollouts for the tasks of a job."""

    def __init__(
        self, config: RlConfig, tasks: TaskSet, runner: EpisodeRunner, warn: Callable[[str], None]
    ):
        self.config = config
        self.tasks = tasks
        self._runner = runner
        self._warn = warn
        self._unclosed: set[str] = set()  # errors that were already reported
        self._params = params_of(config, config.samples_per_prompt, config.temperature)

    async def play(self, weights: Newest, tasks: Sequence[Task], number: int) -> Rollouts:
        """Run episodes of these tasks. Their seed is derived from `number`."""
        drawn = await self._runner.play(
            weights, tasks, self._params, self.config.seed * 100_003 + number
        )
        for text, count in drawn.failures.items():
            self._warn(f"{count} episode(s) dropped: {text}")
        for text, count in drawn.unclosed.items():
            if text not in self._unclosed:
                self._warn(
                    f"{count} environment(s) did not close: {text}; "
                    "their episodes count, and this warning is shown once"
                )
        self._unclosed |= set(drawn.unclosed)
        return drawn

    def check(self, drawn: Rollouts) -> None:
        """Check the share of failed episodes.

        Raises:
            InternalError: The share is above `env.max_failed_share`.
        """
        drawn.check(self.config.env)

    def task(self, index: int) -> Task:
        """Return the task at this index of the concatenated batches."""
        batch, place = divmod(index, self.config.prompts)
        return self.tasks.batch(self.config.prompts, batch)[place]

    def useful(self, rollouts: list[Rollout], counts: RolloutCounts) -> list[Rollout]:
        """Return the rollouts that pass the filter."""
        if self.config.filter.type == "none" or not rollouts:
            return rollouts
        groups = np.asarray([r.group for r in rollouts])
        # Compare rewards without the length penalty: two wrong answers of different length have
        # no spread. Rounding is needed because 0.3 - 0.9 + 0.9 is not exactly 0.3.
        kept = varied(np.round([r.reward - r.overlong for r in rollouts], 9), groups)
        counts.by_name["prompts_without_spread"] += len(set(groups.tolist())) - len(kept)
        return [r for r in rollouts if r.group in kept]

    @property
    def most_batches(self) -> int:
        """The number of batches after which an iteration continues with fewer prompts."""
        return self.config.filter.max_batches if self.config.filter.type == "varied" else 1

    async def batch(self, weights: Newest, first: int) -> tuple[TrainingBatch, int]:
        """Sample batches of tasks, from number `first` on, until enough prompts pass the filter.

        Returns:
            The training batch, and the number of the next batch of tasks.
        """
        counts, kept, number = RolloutCounts(), list[Rollout](), first
        while (
            number - first < self.most_batches
            and len({r.group for r in kept}) < self.config.prompts
        ):
            tasks = self.tasks.batch(self.config.prompts, number)
            number += 1
            counts.by_name["batches_drawn"] += 1
            drawn = await self.play(weights, tasks, number)
            self.check(drawn)
            counts.add(drawn)
            counts.rollouts += drawn.rollouts
            offset = self.config.prompts * number
            kept += [
                replace(r, group=offset + r.group) for r in self.useful(drawn.rollouts, counts)
            ]
        wanted = set(sorted({r.group for r in kept})[: self.config.prompts])
        return TrainingBatch([r for r in kept if r.group in wanted], counts.metrics()), number
