"""Every accepted request gets its answer, whatever ends in the same moment."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.controller.controller import Controller
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.model import AdamParams
from tests.controller.test_controller import batch, done, model_in
from tests.controller.test_used_ids import started
from tests.fakes import FakeBackend


def slow_commits(controller: Controller, seconds: float) -> None:
    commits: Any = controller.journal._commits  # type: ignore[attr-defined]
    write = commits._write

    def slow(entries: Any) -> None:
        time.sleep(seconds)
        write(entries)

    commits._write = slow


async def test_samples_accepted_together_with_the_end_of_their_session_are_answered(tmp_path: Path):
    controller = await started(tmp_path)
    session = await controller.create_session()
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    slow_commits(controller, 0.05)

    async def sampled(number: int) -> rs.Result | None:
        params = rq.SamplingParams(max_tokens=1)
        request = rq.Sample(
            sampler_id=sampler.sampler_id, prompt=(1, 2, 3), params=params, seq_id=number
        )
        return await controller.answers.whole(await controller.submit(request), 10)

    samples = list[asyncio.Task[rs.Result | None]]()
    for number in range(5):
        samples.append(asyncio.create_task(sampled(number)))
        await asyncio.sleep(0.01)
    await controller.finish_session(session)
    answers = await asyncio.gather(*samples)
    assert all(isinstance(answer, rs.SampleOutput | rs.Failure) for answer in answers)
    ends = [a.message for a in answers if isinstance(a, rs.Failure)]
    assert all("was finished before this ran" in text for text in ends)
    async with asyncio.timeout(10):
        while sampler.users or controller.queue.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await controller.close()


async def test_no_sampler_is_opened_while_the_end_of_its_session_is_written(tmp_path: Path):
    controller = await started(tmp_path)
    session = await controller.create_session()
    slow_commits(controller, 0.05)
    ending = asyncio.create_task(controller.finish_session(session))
    await asyncio.sleep(0.02)
    sampler_id = f"{session}:sample:0"
    with pytest.raises(NotFound):
        await controller.open_sampler(sampler_id, session, "tiny", None)
    await ending
    with pytest.raises(NotFound):
        await controller.get_sampler(sampler_id)
    await controller.close()


class Refusing(FakeBackend):
    """A backend whose next call of a verb raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, BaseException] = {}

    async def _call(self, verb: str, model_id: str) -> None:
        if (error := self.errors.pop(verb.split()[0], None)) is not None:
            raise error
        await super()._call(verb, model_id)


async def test_a_load_ends_a_batch_that_failed(tmp_path: Path):
    backend = Refusing()
    controller = await started(tmp_path, backend)
    _, model_id = await model_in(controller)

    async def asked(request: rq.Request) -> rs.Result:
        return await done(controller, await controller.submit(request))

    save = await asked(rq.SaveWeights(model_id=model_id, name="a", seq_id=1))
    assert isinstance(save, rs.Saved)
    backend.errors["forward_backward"] = InvalidRequest("datum 0: the loss is not finite")
    assert isinstance(await asked(batch(model_id, 2)), rs.Failure)
    load = rq.LoadWeights(model_id=model_id, path=save.path, seq_id=3, with_optimizer=True)
    assert isinstance(await asked(load), rs.Loaded)
    assert isinstance(await asked(batch(model_id, 4)), rs.LossOutput)
    assert isinstance(await asked(rq.OptimStep(model_id, AdamParams(), 5)), rs.StepDone)
    await controller.abandon()
    controller = await started(tmp_path, Refusing())
    assert isinstance(await asked(batch(model_id, 6)), rs.LossOutput)
    assert isinstance(await asked(rq.OptimStep(model_id, AdamParams(), 7)), rs.StepDone)
    await controller.close()


class Panic(BaseException):
    """What a library in Rust raises."""


async def test_a_panic_of_a_library_is_an_answer_and_the_model_continues(tmp_path: Path):
    backend = Refusing()
    controller = await started(tmp_path, backend)
    _, model_id = await model_in(controller)
    backend.errors["optim_step"] = Panic("at the disco")
    failed = await done(
        controller, await controller.submit(rq.OptimStep(model_id, AdamParams(), 1))
    )
    assert isinstance(failed, rs.Failure) and "Panic: at the disco" in failed.message
    assert isinstance(
        await done(controller, await controller.submit(batch(model_id, 2))), rs.LossOutput
    )
    await controller.close()
