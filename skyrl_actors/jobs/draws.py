"""Tasks played, counted, and those left out that teach nothing: what all schedules do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_actors.config.job import RlConfig
from skyrl_actors.jobs.environment import Task, TaskSet
from skyrl_actors.jobs.episodes import Drawn, Newest, Sampler
from skyrl_actors.jobs.reduction import varied
from skyrl_actors.jobs.rollout import Rollout
from skyrl_actors.messages.requests import SamplingParams

COUNTED = ("episodes_failed", "prompts_too_long", "prompts_without_spread", "batches_drawn", "sampled_tokens")


@dataclass(frozen=True, slots=True)
class Found:
    """The batch of one iteration."""

    rollouts: list[Rollout]
    metrics: dict[str, float]


def params_of(config: RlConfig, num_samples: int, temperature: float) -> SamplingParams:
    """A correction weighs tokens by the distribution that they were sampled from, so it needs their logprobs in that one too."""
    return SamplingParams(
        config.max_tokens,
        num_samples,
        temperature,
        stop=config.stop or None,
        stop_at_end_too=bool(config.stop),
        tempered_logprobs=config.correction.type != "none" and temperature > 0,
    )


class Tally:
    """What was played since the last batch."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        self.rollouts: list[Rollout] = []

    def saw(self, drawn: Drawn) -> None:
        self.counts["episodes_failed"] += drawn.failures.total()
        self.counts["prompts_too_long"] += drawn.long_prompts
        self.counts["sampled_tokens"] += sum(int(r.sampled.sum()) for r in drawn.rollouts)

    def metrics(self) -> dict[str, float]:
        found = {name: float(value) for name, value in self.counts.items()}
        if not self.rollouts:
            return found
        return found | {
            "reward": float(np.mean([r.reward for r in self.rollouts])),
            "answer_tokens": float(np.mean([int(r.sampled.sum()) for r in self.rollouts])),
            "cut_share": float(np.mean([r.cut for r in self.rollouts])),
            "turns": float(np.mean([r.turns for r in self.rollouts])),
        }


class Draws:
    def __init__(self, config: RlConfig, tasks: TaskSet, player: Sampler, warn: Callable[[str], None]):
        self.config = config
        self.tasks = tasks
        self._player = player
        self._warn = warn
        self._unclosed: set[str] = set()  # said already
        self._params = params_of(config, config.samples_per_prompt, config.temperature)

    async def play(self, weights: Newest, tasks: Sequence[Task], number: int) -> Drawn:
        """`number` of what is drawn: its seed."""
        drawn = await self._player.play(weights, tasks, self._params, self.config.seed * 100_003 + number)
        for text, count in drawn.failures.items():
            self._warn(f"{count} episode(s) dropped: {text}")
        for text, count in drawn.unclosed.items():
            if text not in self._unclosed:
                self._warn(f"{count} environment(s) did not close: {text}; their episodes count, and this is said once")
        self._unclosed |= set(drawn.unclosed)
        return drawn

    def check(self, drawn: Drawn) -> None:
        """Raises InternalError when more episodes failed than may."""
        drawn.check(self.config.env)

    def task(self, index: int) -> Task:
        """Of all batches one behind the other."""
        batch, place = divmod(index, self.config.prompts)
        return self.tasks.batch(self.config.prompts, batch)[place]

    def useful(self, rollouts: list[Rollout], tally: Tally) -> list[Rollout]:
        """Those that the filter leaves."""
        if self.config.filter.type == "none" or not rollouts:
            return rollouts
        groups = np.asarray([r.group for r in rollouts])
        # What the answers are worth: two wrong ones of unlike length teach nothing. 0.3 - 0.9 + 0.9 is not quite 0.3.
        kept = varied(np.round([r.reward - r.overlong for r in rollouts], 9), groups)
        tally.counts["prompts_without_spread"] += len(set(groups.tolist())) - len(kept)
        return [r for r in rollouts if r.group in kept]

    @property
    def most_batches(self) -> int:
        """To draw for one iteration before it goes on with fewer prompts."""
        return self.config.filter.max_batches if self.config.filter.type == "varied" else 1

    async def batch(self, weights: Newest, first: int) -> tuple[Found, int]:
        """Batches of tasks, from number `first` on, until there are enough prompts to learn from; and the number of the next."""
        tally, kept, number = Tally(), list[Rollout](), first
        while number - first < self.most_batches and len({r.group for r in kept}) < self.config.prompts:
            tasks = self.tasks.batch(self.config.prompts, number)
            number += 1
            tally.counts["batches_drawn"] += 1
            drawn = await self.play(weights, tasks, number)
            self.check(drawn)
            tally.saw(drawn)
            tally.rollouts += drawn.rollouts
            offset = self.config.prompts * number
            kept += [replace(r, group=offset + r.group) for r in self.useful(drawn.rollouts, tally)]
        wanted = set(sorted({r.group for r in kept})[: self.config.prompts])
        return Found([r for r in kept if r.group in wanted], tally.metrics()), number
