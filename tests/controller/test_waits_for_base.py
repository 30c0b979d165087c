"""A sample that has its turn and waits for its base model has not begun."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from tests.backends.test_catalogue import FakeFactory
from tests.controller.test_long_fills import Service


class Waiting(Service):
    """Base b has a long sample, and base a is parked."""

    async def sample(self, base: str, number: int) -> str:
        params = rq.SamplingParams(max_tokens=50)
        sampler_id = f"s{base}:sample:0"
        request = rq.Sample(sampler_id=sampler_id, prompt=(1,) * 100, params=params, seq_id=number)
        return await self.controller.submit(request)

    async def shows(self, *running: bool) -> None:
        """Wait until the open requests, by age, run or do not run."""
        async with asyncio.timeout(20):
            while True:
                shown = await self.controller.operators.list_requests(None, 9)
                if [one.is_running for one in shown] == [*running]:
                    return
                await asyncio.sleep(0.01)

    async def answer(self, request_id: str) -> rs.Result | None:
        return await self.controller.answers.whole(request_id, 5)

    async def prompt_tokens(self) -> dict[str, int]:
        used = await self.controller.admin.usage.usage(0, 2**40, None)
        return {row.base_model: row.prompt_tokens for row in used}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Waiting]:
    made = Waiting(tmp_path, FakeFactory("ab"))
    controller = made.controller
    await controller.start()
    for base in "ab":
        await controller.create_session(f"s{base}")
        spec = ModelSpec(model_id=f"s{base}:train:0", base_model=base, lora=LoraSpec(rank=4))
        create = rq.CreateModel(spec=spec, session_id=f"s{base}")
        await made.answer(await controller.submit(create))
        await controller.open_sampler(f"s{base}:sample:0", f"s{base}", base, None)
    made.factory.built["b"].go.clear()
    await made.sample("b", 1)
    await made.shows(True)
    yield made
    made.factory.built["b"].go.set()
    await controller.abandon()


async def test_a_cancelled_one_is_not_charged(service: Waiting):
    waiting = await service.sample("a", 1)
    await service.controller.submit(rq.OptimStep("sb:train:0", AdamParams(), 1))
    await service.shows(True, False, True)
    await service.controller.cancel_sample(waiting)
    assert isinstance(await service.answer(waiting), rs.Failure)
    assert (await service.prompt_tokens())["a"] == 0


async def test_a_running_one_is_charged_while_its_base_model_leaves(service: Waiting):
    await service.sample("a", 1)  # so that b has to leave
    await asyncio.sleep(0.1)
    running = next(iter(service.controller._ledger.ops))
    await service.controller.cancel_sample(running)
    assert isinstance(await service.answer(running), rs.Failure)
    assert (await service.prompt_tokens())["b"] == 100


async def test_it_ends_with_its_session(service: Waiting):
    waiting = await service.sample("a", 1)
    await asyncio.sleep(0.1)
    ending = asyncio.create_task(service.controller.finish_session("sa"))
    answer = await service.answer(waiting)
    assert isinstance(answer, rs.Failure) and "was finished before this ran" in answer.message
    service.factory.built["b"].go.set()
    await ending


async def test_the_reason_why_a_step_cannot_be_stopped_is_named(service: Waiting):
    step = await service.controller.submit(rq.OptimStep("sa:train:0", AdamParams(), 1))
    await service.shows(True, True)
    with pytest.raises(InvalidRequest, match="waits for its base model, and cannot be stopped"):
        await service.controller.operators.cancel_request(step, "eve")
