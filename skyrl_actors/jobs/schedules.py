"""Where the batch of an iteration comes from: drawn when it is asked for, one ahead, or by a stream of episodes that never waits."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from skyrl_actors.config.schedules import Asynchronous
from skyrl_actors.jobs.draws import Draws, Found, Tally
from skyrl_actors.jobs.episodes import Drawn, Newest
from skyrl_actors.jobs.rollout import Rollout, Weights
from skyrl_actors.jobs.staleness import Window

Books = dict[str, Any]


class Schedule(Protocol):
    async def batch(self, iteration: int) -> Found:
        """Of this iteration; they are asked for one by one. Raises what playing raised."""
        ...

    def books(self) -> Books:
        """As JSON: from where to go on."""
        ...

    def published(self) -> None:
        """There are newer weights."""
        ...

    async def close(self) -> None: ...


class OnPolicy:
    def __init__(self, draws: Draws, newest: Newest, books: Books):
        self._draws = draws
        self._newest = newest
        self._next = int(books.get("batches", 0))

    async def batch(self, iteration: int) -> Found:
        found, self._next = await self._draws.batch(self._newest, self._next)
        return found

    def books(self) -> Books:
        return {"batches": self._next}

    def published(self) -> None:
        pass

    async def close(self) -> None:
        pass


class OneStepOff:
    """A run that goes on draws anew what was under way."""

    def __init__(self, draws: Draws, newest: Newest, books: Books, last_iteration: int):
        self._draws = draws
        self._newest = newest
        self._last = last_iteration
        self._next = int(books.get("batches", 0))
        self._ahead: asyncio.Task[tuple[Found, int]] | None = None

    async def batch(self, iteration: int) -> Found:
        found, self._next = await (self._ahead or self._begun())
        self._ahead = self._begun() if iteration < self._last else None
        return found

    def _begun(self) -> "asyncio.Task[tuple[Found, int]]":
        pinned = self._newest()
        return asyncio.create_task(self._draws.batch(lambda: pinned, self._next))

    def books(self) -> Books:
        return {"batches": self._next}

    def published(self) -> None:
        pass

    async def close(self) -> None:
        await _ended([self._ahead] if self._ahead else [])


class Stream:
    """Groups of episodes, each a task of its own; who is open when a run ends is begun again by the run that goes on."""

    def __init__(
        self, draws: Draws, newest: Newest, books: Books, config: Asynchronous, iteration: int, last_iteration: int
    ):  # fmt: skip
        self._draws = draws
        self._newest = newest
        self._config = config
        self._window = Window(draws.config.prompts, config.max_staleness, iteration, last_iteration)
        self._next = int(books.get("next", 0))
        self._again: list[int] = [int(group) for group in books.get("open", [])]
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._finished: dict[int, list[Rollout]] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._tally, self._since = Tally(), Drawn()
        self._ended = 0  # groups since the last batch

    async def batch(self, iteration: int) -> Found:
        while True:
            self._fill()
            if (groups := self._window.take(with_fewer=self._drew_enough)) is not None:
                return self._taken(groups)
            await self._changed.wait()
            self._changed.clear()
            if self._error is not None:
                raise self._error

    @property
    def _drew_enough(self) -> bool:
        """The filter left too few of all that may be drawn for one iteration: it goes on with what there is once the rest has ended."""
        config = self._draws.config
        if config.filter.type == "none" or self._ended < config.prompts * self._draws.most_batches:
            return False
        return self._window.num_finished < config.prompts

    def _fill(self) -> None:
        while not self._drew_enough and self._window.may_begin(self._newest().iteration):
            group = self._again.pop(0) if self._again else self._next
            self._next = max(self._next, group + 1)
            self._window.began(group, self._newest().iteration)
            self._playing[group] = asyncio.create_task(self._play(group))
            self._playing[group].add_done_callback(self._ended_with)

    def _ended_with(self, playing: asyncio.Task[None]) -> None:
        if not playing.cancelled():
            self._error = self._error or playing.exception()
        self._changed.set()

    async def _play(self, group: int) -> None:
        pinned = self._newest()
        weights = self._newest if self._config.in_flight == "update" else lambda: pinned
        drawn = await self._draws.play(weights, [self._draws.task(group)], group + 1)
        self._ended += 1
        self._tally.saw(drawn)
        self._check(drawn)
        rollouts = [replace(r, group=group) for r in drawn.rollouts]
        kept = self._draws.useful(rollouts, self._tally)
        if kept or self._draws.config.filter.type == "none":
            self._finished[group] = kept
            self._window.finished(group)
        else:
            self._tally.rollouts += rollouts
            self._window.dropped(group)
        del self._playing[group]
        self._fill()

    def _check(self, drawn: Drawn) -> None:
        """Raises InternalError when too many of a batch's worth of episodes failed."""
        self._since.add(drawn)
        if self._since.episodes >= self._draws.config.prompts * self._draws.config.samples_per_prompt:
            self._draws.check(self._since)
            self._since = Drawn()

    def _taken(self, groups: list[int]) -> Found:
        rollouts = [rollout for group in groups for rollout in self._finished.pop(group)]
        self._tally.rollouts += rollouts
        self._tally.counts["batches_drawn"] = -(-self._ended // self._draws.config.prompts)
        metrics = self._tally.metrics()
        self._tally, self._ended = Tally(), 0
        return Found(rollouts, metrics)

    def books(self) -> Books:
        return {"next": self._next, "open": sorted({*self._again, *self._window.open})}

    def published(self) -> None:
        self._fill()

    async def close(self) -> None:
        await _ended(list(self._playing.values()))


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def schedule_of(
    draws: Draws, newest: Callable[[], Weights], books: Books, iteration: int
) -> Schedule:  # fmt: skip
    """`iteration`: the last that is done; `books` those of it."""
    config, last = draws.config.schedule, draws.config.iterations
    if config.type == "on_policy":
        return OnPolicy(draws, newest, books)
    if config.type == "one_step_off":
        return OneStepOff(draws, newest, books, last)
    return Stream(draws, newest, books, config, iteration, last)
