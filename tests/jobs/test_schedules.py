"""Schedules with engines that answer when a test lets them: whose weights sample what, what is open, what a resumed run begins with."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.config.load import load
from skyrl_actors.jobs.draws import Draws
from skyrl_actors.jobs.envs import ReverseTasks
from skyrl_actors.jobs.episodes import Sampler
from skyrl_actors.jobs.rollout import Weights
from skyrl_actors.jobs.schedules import Schedule, schedule_of
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.requests import Sample
from skyrl_actors.messages.results import SampleOutput, Sequence
from tests.conftest import ROOT

END = 9


class Texts:
    """Words as numbers; what a chat template does is tested elsewhere."""

    def prompt(self, messages: Any) -> tuple[int, ...]:
        return tuple(messages[0]["content"].encode())

    def text(self, answer: Any) -> str:
        return str(len(answer))


class Engine:
    """Answers a request when it is let to: `length` tokens of an answer in all, then the end mark."""

    def __init__(self, length: int = 3):
        self.length = length
        self.open: list[tuple[Sample, asyncio.Future[SampleOutput]]] = []
        self.asked: list[Sample] = []

    async def run(self, request: Sample, expected: type) -> SampleOutput:
        self.asked.append(request)
        answer: asyncio.Future[SampleOutput] = asyncio.get_running_loop().create_future()
        self.open.append((request, answer))
        return await answer

    async def answer(self, which: Callable[[Sample], bool] = lambda request: True) -> int:
        """All that are open and so, and whatever follows at once; how many."""
        now, self.open = [x for x in self.open if which(x[0])], [x for x in self.open if not which(x[0])]
        for request, answer in now:
            have = request.prompt.count(1)  # no text has it
            tokens = [1] * min(request.params.max_tokens, self.length - have)
            done = have + len(tokens) == self.length and len(tokens) < request.params.max_tokens
            tokens += [END] if done else []
            each = Sequence(np.asarray(tokens, np.int32), np.full(len(tokens), -1.0, np.float32), "stop" if done else "length")
            answer.set_result(SampleOutput((each,) * request.params.num_samples, f"of {request.sampler_id}"))
        for _ in range(20):
            await asyncio.sleep(0)
        return len(now)


class Made:
    """A schedule, its engine, and weights that a test publishes."""

    def __init__(
        self, schedule: dict[str, Any], books: dict[str, Any] | None = None, iteration: int = 0, length: int = 3, **job: Any
    ):
        given = {"type": "ppo", "prompts": 2, "samples_per_prompt": 2, "iterations": 6, "overlong": {"cut_answers": "score"}}
        self.config = RlConfig.model_validate({**given, **job, "schedule": schedule})
        self.engine, self.weights, self.said = Engine(length), Weights(f"w{iteration}", iteration), list[str]()
        tasks = ReverseTasks(cast(Any, self.config.env), 0)
        slices = (
            getattr(self.config.schedule, "slice_tokens", None)
            if getattr(self.config.schedule, "in_flight", "") == "update"
            else None
        )
        player = Sampler(cast(Any, self.engine), cast(Any, Texts()), self.config.env, self.config.overlong, 100, slices)
        self.draws = Draws(self.config, tasks, player, self.said.append)
        self.schedule: Schedule = schedule_of(self.draws, lambda: self.weights, books or {}, iteration)

    def publish(self, iteration: int) -> None:
        self.weights = Weights(f"w{iteration}", iteration)
        self.schedule.published()

    async def batch(self, iteration: int, let: Callable[[Sample], bool] = lambda request: True):
        waiting = asyncio.create_task(self.schedule.batch(iteration))
        for _ in range(50):
            await asyncio.sleep(0.001)
            if waiting.done():
                break
            await self.engine.answer(let)
        return await asyncio.wait_for(waiting, 5)

    def asked_of(self, weights: str) -> int:
        return sum(request.sampler_id == weights for request in self.engine.asked)


async def test_one_step_off_samples_the_next_batch_while_this_one_is_learned():
    made = Made({"type": "one_step_off"}, iterations=3)
    first = await made.batch(1)
    assert {p.iteration for r in first.rollouts for p in r.pieces} == {0} and made.schedule.books() == {"batches": 1}
    await asyncio.sleep(0.01)
    assert made.asked_of("w0") == 4  # two prompts of this batch and two of the next, which is under way
    made.publish(1)
    second = await made.batch(2)
    assert {p.iteration for r in second.rollouts for p in r.pieces} == {0}
    await asyncio.sleep(0.01)
    made.publish(2)
    third = await made.batch(3)
    assert {p.iteration for r in third.rollouts for p in r.pieces} == {1}
    assert len(made.engine.asked) == 6 and not made.engine.open  # nothing is sampled for an iteration that is not to come
    on_policy = Made({"type": "on_policy"}, iterations=3)
    same = [await on_policy.batch(k) for k in (1, 2, 3)]
    assert [r.task.question for found in (first, second, third) for r in found.rollouts] == [
        r.task.question for found in same for r in found.rollouts
    ]
    await made.schedule.close()


async def test_a_stream_learns_from_nothing_older_than_the_bound_and_begins_as_others_end():
    made = Made({"type": "asynchronous", "max_staleness": 1})
    slow = made_question(made, 0)

    def is_slow(request: Sample) -> bool:
        return bytes(request.prompt).decode() == slow

    first = await made.batch(1, lambda request: not is_slow(request))
    assert slow not in {r.task.question for r in first.rollouts} and len(first.rollouts) == 4
    made.publish(1)
    waiting = asyncio.create_task(made.schedule.batch(2))
    for _ in range(10):
        await asyncio.sleep(0.001)
        await made.engine.answer(lambda request: not is_slow(request))
    assert not waiting.done()  # enough are there, but the slow one would be too old for the batch behind this one
    await made.engine.answer()
    second = await asyncio.wait_for(waiting, 5)
    assert slow in {r.task.question for r in second.rollouts}
    assert made.asked_of("w1") > 0
    await made.schedule.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def made_question(made: Made, index: int) -> str:
    return (
        ReverseTasks(cast(Any, made.config.env), 0).batch(made.config.prompts, index // made.config.prompts)[index % 2].question
    )


async def test_answers_go_on_with_the_newest_weights_slice_by_slice():
    made = Made({"type": "asynchronous", "in_flight": "update", "slice_tokens": 2}, length=5, max_tokens=8)
    waiting = asyncio.create_task(made.schedule.batch(1))
    for iteration in (0, 1, 2):
        await asyncio.sleep(0.005)
        made.publish(iteration)
        await made.engine.answer()
    found = await asyncio.wait_for(waiting, 5)
    for rollout in found.rollouts:
        assert rollout.answer.tolist() == [1] * 5 + [END] and not rollout.cut and len(rollout.logprobs) == 6
        assert [(p.version, p.num_tokens) for p in rollout.pieces] == [("of w0", 2), ("of w0", 2), ("of w1", 2)]
        assert rollout.made_at.tolist() == [0, 0, 0, 0, 1, 1]
    later = [r for r in made.engine.asked if r.prompt.count(1)]
    assert {r.params.num_samples for r in later} == {1}
    seeds = [r.params.seed for r in made.engine.asked if r.prompt.count(1) in (2, 4)]
    assert len(set(seeds)) == len(seeds)  # every slice of every draw draws anew
    await made.schedule.close()


async def test_a_filter_that_leaves_nothing_ends_the_iteration_after_so_many_batches():
    made = Made(
        {"type": "asynchronous", "max_staleness": 1},
        filter={"type": "varied", "max_batches": 2},
        env={"type": "reverse"},
        iterations=3,
    )
    for iteration in (1, 2, 3):  # all rewards are 0; the numbers of the weights go on all the same
        found = await made.batch(iteration)
        assert not found.rollouts and found.metrics["prompts_without_spread"] >= 4
        made.publish(iteration)
    assert len(made.engine.asked) <= 3 * 2 * 2 + 3 * 4  # two batches an iteration, and what was open
    await made.schedule.close()


async def test_a_run_that_goes_on_begins_with_what_was_open():
    made = Made({"type": "asynchronous", "max_staleness": 1})
    found = await made.batch(1)
    learned = {r.group for r in found.rollouts}
    books = made.schedule.books()
    await made.schedule.close()
    assert books["next"] >= 4 and not learned & set(books["open"]) and learned | set(books["open"]) == set(range(books["next"]))
    resumed = Made({"type": "asynchronous", "max_staleness": 1}, books, iteration=1)
    found = await resumed.batch(2)
    assert {r.group for r in found.rollouts} == set(books["open"][:2])
    assert {r.task.question for r in found.rollouts} == {made_question(made, group) for group in books["open"][:2]}
    await resumed.schedule.close()


async def test_a_stream_ends_with_what_ended_it():
    long = Made({"type": "asynchronous"}, env={"type": "reverse", "max_prompt_tokens": 3, "long_prompts": "refuse"})
    with pytest.raises(ConfigError, match="a prompt has"):
        await long.batch(1)
    await long.schedule.close()

    class Broken:
        question = answer = ""

        def open(self) -> Any:
            raise OSError("no such tool")

    failing = Made({"type": "asynchronous"}, env={"type": "reverse", "max_failed_share": 0.2})
    failing.draws.task = lambda index: cast(Any, Broken())  # type: ignore[method-assign]
    with pytest.raises(
        InternalError, match=r"4 of 4 episodes failed, more than env.max_failed_share 0.2 allows: open raised OSError"
    ):
        await failing.batch(1)
    await failing.schedule.close()
    assert failing.said[0] == "2 episode(s) dropped: open raised OSError: no such tool"


def test_schedules_that_can_not_be_are_refused():
    base = ROOT / "configs/jobs/async_tiny.yaml"
    refused = {
        ("cluster.placement.layout=colocated",): "samples while it learns",
        ("job.schedule.max_staleness=4",): "uses up to 5 versions",
        ("job.mismatch_stop=1",): "learns from older ones",
        ("job.schedule.in_flight=finish",): "slice_tokens belongs to in_flight update",
    }
    for options, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            load(base, options, JobConfig)
    config = load(base, (), JobConfig)
    assert isinstance(config.job, RlConfig) and config.job.correction.type == "truncated"
    assert isinstance(load(base, ["job.correction.type=none"], JobConfig).job, RlConfig)
