"""Test schedules with an engine that answers when the test lets it.

The tests check which weights sample which episodes, what is open, and how a run resumes.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.config.load import load
from skyrl_actors.jobs.envs import ReverseTasks
from skyrl_actors.jobs.episodes import EpisodeRunner
from skyrl_actors.jobs.prompts import Prompt
from skyrl_actors.jobs.rollout import Weights
from skyrl_actors.jobs.rollout_source import RolloutSource
from skyrl_actors.jobs.schedules import Schedule, schedule_of
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.requests import Sample
from skyrl_actors.messages.results import SampleOutput, Sequence
from tests.conftest import ROOT

END = 9


class Texts:
    """A tokenizer without a chat template, with one token for each byte."""

    def check_images(self, images: Any) -> None:
        assert not images

    def prompt(self, messages: Any) -> Prompt:
        return Prompt(tuple(messages[0]["content"].encode()))

    def text(self, answer: Any) -> str:
        return str(len(answer))


class Engine:
    """Answers requests when `answer` is called: `length` tokens in total, then the end mark."""

    def __init__(self, length: int = 3):
        self.length = length
        self.open: list[tuple[Sample, asyncio.Future[SampleOutput]]] = []
        self.asked: list[Sample] = []
        self._answers: dict[str, asyncio.Future[SampleOutput]] = {}

    async def submit(self, request: Sample, mark: str = "", request_id: str = "") -> str:
        self.asked.append(request)
        self._answers[request_id] = asyncio.get_running_loop().create_future()
        self.open.append((request, self._answers[request_id]))
        return request_id

    async def result(self, request_id: str, expected: type) -> SampleOutput:
        return await self._answers.pop(request_id)

    async def has_open(self, count: int) -> None:
        """Wait until so many requests are open, however slow the machine is."""
        async with asyncio.timeout(20):
            while len(self.open) < count:  # noqa: ASYNC110  the schedule asks in the background
                await asyncio.sleep(0.001)

    async def answer(self, which: Callable[[Sample], bool] = lambda request: True) -> int:
        """Answer the open requests that `which` selects, and return their number."""
        now, self.open = (
            [x for x in self.open if which(x[0])],
            [x for x in self.open if not which(x[0])],
        )
        for request, answer in now:
            have = request.prompt.count(1)  # no prompt text contains token 1
            tokens = [1] * min(request.params.max_tokens, self.length - have)
            done = have + len(tokens) == self.length and len(tokens) < request.params.max_tokens
            tokens += [END] if done else []
            each = Sequence(
                tokens=np.asarray(tokens, np.int32),
                logprobs=np.full(len(tokens), -1.0, np.float32),
                stop_reason="stop" if done else "length",
            )
            answer.set_result(
                SampleOutput(
                    sequences=(each,) * request.params.num_samples,
                    version=f"of {request.sampler_id}",
                )
            )
        for _ in range(20):
            await asyncio.sleep(0)
        return len(now)


class ScheduleUnderTest:
    """A schedule, its engine, and the weights that the test publishes."""

    def __init__(
        self,
        schedule: dict[str, Any],
        saved: dict[str, Any] | None = None,
        iteration: int = 0,
        length: int = 3,
        **job: Any,
    ):
        given = {
            "type": "ppo",
            "prompts": 2,
            "samples_per_prompt": 2,
            "iterations": 6,
            "overlong": {"cut_answers": "score"},
        }
        self.config = RlConfig.model_validate({**given, **job, "schedule": schedule})
        self.engine, self.weights, self.warnings = (
            Engine(length),
            Weights(f"w{iteration}", iteration),
            list[str](),
        )
        tasks = ReverseTasks(cast(Any, self.config.env), 0)
        slices = getattr(self.config.schedule, "slice_tokens", None)
        runner = EpisodeRunner(
            cast(Any, self.engine),
            cast(Any, Texts()),
            self.config.env,
            self.config.overlong,
            100,
            slices,
        )
        self.rollout_source = RolloutSource(self.config, tasks, runner, self.warnings.append)
        self.schedule: Schedule = schedule_of(
            self.rollout_source, lambda: self.weights, saved or {}, iteration
        )

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


async def test_one_step_off_samples_the_next_batch_during_training():
    made = ScheduleUnderTest({"type": "one_step_off"}, iterations=3)
    first = await made.batch(1)
    assert {p.iteration for r in first.rollouts for p in r.pieces} == {
        0
    } and made.schedule.state() == {"batches": 1}
    await made.engine.has_open(2)
    assert made.asked_of("w0") == 4  # two prompts of this batch, and two of the next one
    made.publish(1)
    second = await made.batch(2)
    assert {p.iteration for r in second.rollouts for p in r.pieces} == {0}
    await made.engine.has_open(2)
    made.publish(2)
    third = await made.batch(3)
    assert {p.iteration for r in third.rollouts for p in r.pieces} == {1}
    # Nothing is sampled beyond the last iteration.
    assert len(made.engine.asked) == 6 and not made.engine.open
    on_policy = ScheduleUnderTest({"type": "on_policy"}, iterations=3)
    same = [await on_policy.batch(k) for k in (1, 2, 3)]
    assert [r.task.question for found in (first, second, third) for r in found.rollouts] == [
        r.task.question for found in same for r in found.rollouts
    ]
    await made.schedule.close()


async def test_a_stream_bounds_staleness_and_starts_groups_as_others_end():
    made = ScheduleUnderTest({"type": "asynchronous", "max_staleness": 1})
    slow = question_of(made, 0)

    def is_slow(request: Sample) -> bool:
        return bytes(request.prompt).decode() == slow

    first = await made.batch(1, lambda request: not is_slow(request))
    assert slow not in {r.task.question for r in first.rollouts} and len(first.rollouts) == 4
    made.publish(1)
    waiting = asyncio.create_task(made.schedule.batch(2))
    for _ in range(10):
        await asyncio.sleep(0.001)
        await made.engine.answer(lambda request: not is_slow(request))
    # Enough groups are finished, but the slow one would be too old for the following batch.
    assert not waiting.done()
    await made.engine.answer()
    second = await asyncio.wait_for(waiting, 5)
    assert slow in {r.task.question for r in second.rollouts}
    assert made.asked_of("w1") > 0
    await made.schedule.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def question_of(made: ScheduleUnderTest, index: int) -> str:
    return (
        ReverseTasks(cast(Any, made.config.env), 0)
        .batch(made.config.prompts, index // made.config.prompts)[index % 2]
        .question
    )


async def test_each_slice_of_an_answer_uses_the_newest_weights():
    made = ScheduleUnderTest({"type": "asynchronous", "slice_tokens": 2}, length=5, max_tokens=8)
    waiting = asyncio.create_task(made.schedule.batch(1))
    for iteration, open_requests in ((0, 6), (1, 12), (2, 12)):
        await made.engine.has_open(open_requests)
        made.publish(iteration)
        await made.engine.answer()
    found = await asyncio.wait_for(waiting, 5)
    for rollout in found.rollouts:
        assert (
            rollout.answer.tolist() == [1] * 5 + [END]
            and not rollout.cut
            and len(rollout.logprobs) == 6
        )
        assert [(p.version, p.num_tokens) for p in rollout.pieces] == [
            ("of w0", 2),
            ("of w0", 2),
            ("of w1", 2),
        ]
        assert rollout.made_at.tolist() == [0, 0, 0, 0, 1, 1]
    later = [r for r in made.engine.asked if r.prompt.count(1)]
    assert {r.params.num_samples for r in later} == {1}
    seeds = [r.params.seed for r in made.engine.asked if r.prompt.count(1) in (2, 4)]
    assert len(set(seeds)) == len(seeds)  # every slice of every sample has its own seed
    await made.schedule.close()


async def test_an_iteration_ends_after_max_batches_if_the_filter_leaves_nothing():
    made = ScheduleUnderTest(
        {"type": "asynchronous", "max_staleness": 1},
        filter={"type": "varied", "max_batches": 2},
        env={"type": "reverse"},
        iterations=3,
    )
    for iteration in (1, 2, 3):  # all rewards are 0, but the version of the weights increases
        found = await made.batch(iteration)
        assert not found.rollouts and found.metrics["prompts_without_spread"] >= 4
        made.publish(iteration)
    # At most two batches for each iteration, and the open groups.
    assert len(made.engine.asked) <= 3 * 2 * 2 + 3 * 4
    await made.schedule.close()


async def test_a_resumed_run_starts_with_the_open_groups():
    made = ScheduleUnderTest({"type": "asynchronous", "max_staleness": 1})
    found = await made.batch(1)
    learned = {r.group for r in found.rollouts}
    saved = made.schedule.state()
    await made.schedule.close()
    assert (
        saved["next"] >= 4
        and not learned & set(saved["open"])
        and learned | set(saved["open"]) == set(range(saved["next"]))
    )
    resumed = ScheduleUnderTest({"type": "asynchronous", "max_staleness": 1}, saved, iteration=1)
    found = await resumed.batch(2)
    assert {r.group for r in found.rollouts} == set(saved["open"][:2])
    assert {r.task.question for r in found.rollouts} == {
        question_of(made, group) for group in saved["open"][:2]
    }
    await resumed.schedule.close()


async def test_a_stream_raises_the_error_of_an_episode():

    class Broken:
        question = answer = ""

        def open(self) -> Any:
            raise OSError("no such tool")

    failing = ScheduleUnderTest(
        {"type": "asynchronous"}, env={"type": "reverse", "max_failed_share": 0.2}
    )
    failing.rollout_source.task = lambda index: cast(Any, Broken())  # type: ignore[method-assign]
    with pytest.raises(
        InternalError,
        match=r"4 of 4 episodes failed, more than env.max_failed_share 0.2 allows: "
        r"open raised OSError",
    ):
        await failing.batch(1)
    await failing.schedule.close()
    assert failing.warnings[0] == "2 episode(s) dropped: open raised OSError: no such tool"


def test_impossible_schedules_are_refused():
    base = ROOT / "configs/jobs/async_tiny.yaml"
    refused = {
        ("cluster.placement.layout=colocated",): "samples while it learns",
        ("job.schedule.max_staleness=4",): "uses up to 5 versions",
        ("job.mismatch_stop=1",): "learns from older ones",
        ("job.schedule.in_flight=finish",): "this key was removed; leave out slice_tokens",
    }
    for options, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            load(base, options, JobConfig)
    config = load(base, (), JobConfig)
    assert isinstance(config.job, RlConfig) and config.job.correction.type == "truncated"
    assert isinstance(load(base, ["job.correction.type=none"], JobConfig).job, RlConfig)
