"""Schedules of sampling: on policy, one batch ahead, or as a continuous stream of episodes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from skyrl_actors.config.schedules import Asynchronous
from skyrl_actors.jobs.answers import Newest
from skyrl_actors.jobs.episodes import Rollouts
from skyrl_actors.jobs.rollout import Rollout, Weights
from skyrl_actors.jobs.rollout_source import RolloutCounts, RolloutSource, TrainingBatch
from skyrl_actors.jobs.staleness import Window

ScheduleState = dict[str, Any]


class Schedule(Protocol):
    """Supplies the training batch of each iteration."""

    async def batch(self, iteration: int) -> TrainingBatch:
        """Return the batch of this iteration. Errors of sampling are raised here.

        Iterations are requested one after the other.
        """
        ...

    def state(self) -> ScheduleState:
        """Return the state that a resumed run starts from, as JSON."""
        ...

    def published(self) -> None:
        """Announce newer weights."""
        ...

    async def close(self) -> None:
        """Cancel all sampling."""
        ...


class OnPolicy:
    """Samples each batch when it is requested, with the current weights."""

    def __init__(self, rollout_source: RolloutSource, newest: Newest, saved: ScheduleState):
        self._rollout_source = rollout_source
        self._newest = newest
        self._next = int(saved.get("batches", 0))

    async def batch(self, iteration: int) -> TrainingBatch:
        found, self._next = await self._rollout_source.batch(self._newest, self._next)
        return found

    def state(self) -> ScheduleState:
        return {"batches": self._next}

    def published(self) -> None:
        pass

    async def close(self) -> None:
        pass


class OneStepOff:
    """Samples the next batch while the current one is trained on.

    A resumed run samples an unfinished batch again.
    """

    def __init__(
        self,
        rollout_source: RolloutSource,
        newest: Newest,
        saved: ScheduleState,
        last_iteration: int,
    ):
        self._rollout_source = rollout_source
        self._newest = newest
        self._last = last_iteration
        self._next = int(saved.get("batches", 0))
        self._ahead: asyncio.Task[tuple[TrainingBatch, int]] | None = None

    async def batch(self, iteration: int) -> TrainingBatch:
        found, self._next = await (self._ahead or self._start_next())
        self._ahead = self._start_next() if iteration < self._last else None
        return found

    def _start_next(self) -> "asyncio.Task[tuple[TrainingBatch, int]]":
        pinned = self._newest()
        return asyncio.create_task(self._rollout_source.batch(lambda: pinned, self._next))

    def state(self) -> ScheduleState:
        return {"batches": self._next}

    def published(self) -> None:
        pass

    async def close(self) -> None:
        await _cancel([self._ahead] if self._ahead else [])


class Stream:
    """Samples groups of episodes continuously, each group in its own asyncio task.

    A resumed run starts the groups again that were open when the run ended.
    """

    def __init__(
        self,
        rollout_source: RolloutSource,
        newest: Newest,
        saved: ScheduleState,
        config: Asynchronous,
        iteration: int,
        last_iteration: int,
    ):
        self._rollout_source = rollout_source
        self._newest = newest
        self._config = config
        self._window = Window(
            rollout_source.config.prompts, config.max_staleness, iteration, last_iteration
        )
        self._next = int(saved.get("next", 0))
        self._to_reopen: list[int] = [int(group) for group in saved.get("open", [])]
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._finished: dict[int, list[Rollout]] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._counts, self._unchecked = RolloutCounts(), Rollouts()
        self._num_ended = 0  # groups since the last batch

    async def batch(self, iteration: int) -> TrainingBatch:
        while True:
            self._fill()
            if (groups := self._window.take(with_fewer=self._drew_enough)) is not None:
                return self._collect(groups)
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error

    @property
    def _drew_enough(self) -> bool:
        """Whether the filter left too few groups of all that may be sampled for one iteration.

        The iteration then continues with fewer groups, after the open groups have ended.
        """
        config = self._rollout_source.config
        if (
            config.filter.type == "none"
            or self._num_ended < config.prompts * self._rollout_source.most_batches
        ):
            return False
        return self._window.num_finished < config.prompts

    def _fill(self) -> None:
        while not self._drew_enough and self._window.may_begin(self._newest().iteration):
            group = self._to_reopen.pop(0) if self._to_reopen else self._next
            self._next = max(self._next, group + 1)
            self._window.began(group, self._newest().iteration)
            self._playing[group] = asyncio.create_task(self._play(group))
            self._playing[group].add_done_callback(self._on_end)

    def _on_end(self, playing: asyncio.Task[None]) -> None:
        if not playing.cancelled():
            self._error = self._error or playing.exception()
        self._changed.set()

    async def _play(self, group: int) -> None:
        pinned = self._newest()
        weights = self._newest if self._config.slice_tokens is not None else lambda: pinned
        drawn = await self._rollout_source.play(
            weights, [self._rollout_source.task(group)], group + 1
        )
        self._num_ended += 1
        self._counts.add(drawn)
        self._check(drawn)
        rollouts = [replace(r, group=group) for r in drawn.rollouts]
        kept = self._rollout_source.useful(rollouts, self._counts)
        if kept or self._rollout_source.config.filter.type == "none":
            self._finished[group] = kept
            self._window.finished(group)
        else:
            self._counts.rollouts += rollouts
            self._window.dropped(group)
        del self._playing[group]
        self._fill()

    def _check(self, drawn: Rollouts) -> None:
        """Check the share of failed episodes, each time as many as a batch has have ended.

        Raises:
            InternalError: The share is above `env.max_failed_share`.
        """
        self._unchecked.add(drawn)
        if (
            self._unchecked.episodes
            >= self._rollout_source.config.prompts * self._rollout_source.config.samples_per_prompt
        ):
            self._rollout_source.check(self._unchecked)
            self._unchecked = Rollouts()

    def _collect(self, groups: list[int]) -> TrainingBatch:
        rollouts = [rollout for group in groups for rollout in self._finished.pop(group)]
        self._counts.rollouts += rollouts
        self._counts.by_name["batches_drawn"] = -(
            -self._num_ended // self._rollout_source.config.prompts
        )
        metrics = self._counts.metrics()
        self._counts, self._num_ended = RolloutCounts(), 0
        return TrainingBatch(rollouts, metrics)

    def state(self) -> ScheduleState:
        return {"next": self._next, "open": sorted({*self._to_reopen, *self._window.open})}

    def published(self) -> None:
        self._fill()

    async def close(self) -> None:
        await _cancel(list(self._playing.values()))


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def schedule_of(
    rollout_source: RolloutSource,
    newest: Callable[[], Weights],
    saved: ScheduleState,
    iteration: int,
) -> Schedule:
    """Create the configured schedule.

    `iteration` is the last completed iteration. `saved` is the state of the schedule after it.
    """
    config, last = rollout_source.config.schedule, rollout_source.config.iterations
    if config.type == "on_policy":
        return OnPolicy(rollout_source, newest, saved)
    if config.type == "one_step_off":
        return OneStepOff(rollout_source, newest, saved, last)
    return Stream(rollout_source, newest, saved, config, iteration, last)
