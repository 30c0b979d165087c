"""Samples of clients that died do not keep engines from others, and none of them is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, LimitsConfig
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.presence import FellSilent, Presence
from skyrl_actors.controller.tenants import TenantSession, TenantTable
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.results import Failure, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend

SILENT_S = 0.3


class Slow(FakeBackend):
    """A backend whose samples with more than one token take until `done`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.aborted: list[str] = []
        self.done = asyncio.Event()

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: rq.SamplingParams,
        weights: SamplerWeights,
        pictures: tuple[Picture, ...] = (),
    ) -> SampleOutput:
        self.begun.append(request_id)
        try:
            if params.max_tokens > 1:
                await self.done.wait()
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        return await super().sample(request_id, prompt, params, weights, pictures)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr("skyrl_actors.controller.presence.CHECK_S", 0.02)
    return Slow()


def controller_in(folder: Path, backend: Slow) -> Controller:
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
        limits=LimitsConfig(samples_in_flight=1),
    )
    made = Controller(config, backend, SqlJournal(config.journal, KINDS))
    made._samples.presence._silent_s = SILENT_S
    return made


@pytest.fixture
async def controller(tmp_path: Path, backend: Slow) -> AsyncIterator[Controller]:
    made = controller_in(tmp_path, backend)
    await made.start()
    yield made
    await made.close()


async def asked(controller: Controller, session: str, seq_id: int = 0, max_tokens: int = 9) -> str:
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    params = rq.SamplingParams(max_tokens=max_tokens, seed=7)
    return await controller.submit(
        rq.Sample(sampler_id=sampler.sampler_id, prompt=(1, 2), params=params, seq_id=seq_id)
    )


async def until(met: Any) -> None:
    async with asyncio.timeout(10):
        while not met():  # noqa: ASYNC110  nothing tells when
            await asyncio.sleep(0.01)


async def test_samples_of_a_dead_client_leave_the_engines_and_run_when_it_is_heard_again(
    controller: Controller, backend: Slow
):
    dead, alive = await controller.create_session(), await controller.create_session()
    orphans = [await asked(controller, dead, n) for n in range(3)]
    await until(lambda: backend.begun)
    mine = await asked(controller, alive, max_tokens=1)
    # All seats are taken. Polls of the other client do not count for the one that died.
    assert isinstance(await controller.answers.whole(mine, 10), SampleOutput)
    first = backend.aborted.copy()
    assert first and set(first) <= set(orphans)
    await until(lambda: not controller._samples.presence._running.get(dead))
    begun = len(backend.begun)
    await asyncio.sleep(0.2)
    assert len(backend.begun) == begun, "the waiting ones do not run either"
    backend.done.set()
    await controller.heartbeat(dead)
    for request_id in orphans:
        assert isinstance(await controller.answers.whole(request_id, 10), SampleOutput)


async def test_a_client_that_polls_is_there_without_heartbeats(
    controller: Controller, backend: Slow
):
    request_id = await asked(controller, await controller.create_session())
    polled = asyncio.ensure_future(controller.answers.whole(request_id, 10))
    await asyncio.sleep(3 * SILENT_S)
    assert not backend.aborted
    backend.done.set()
    assert isinstance(await polled, SampleOutput)


async def test_queued_samples_of_an_ended_session_fail_and_running_ones_are_answered(
    controller: Controller, backend: Slow
):
    session = await controller.create_session()
    running, waiting = [await asked(controller, session, n) for n in range(2)]
    await until(lambda: backend.begun)
    await controller.finish_session(session)
    result = await controller.answers.whole(waiting, 10)
    assert isinstance(result, Failure) and result.category == "user"
    assert result.message == f"session {session} was finished before this ran"
    backend.done.set()
    assert isinstance(await controller.answers.whole(running, 10), SampleOutput)
    assert not controller.tenants.samplers and not backend.aborted


async def test_samples_of_a_dead_client_fail_when_its_session_ends(
    controller: Controller, backend: Slow
):
    session = await controller.create_session()
    running, waiting = [await asked(controller, session, n) for n in range(2)]
    await until(lambda: backend.aborted == [running])
    await controller.finish_session(session)
    for request_id in (running, waiting):
        assert isinstance(await controller.answers.whole(request_id, 10), Failure)
    assert backend.begun == [running]


async def test_a_drain_answers_the_samples_of_dead_clients_too(
    controller: Controller, backend: Slow
):
    session = await controller.create_session()
    request_id = await asked(controller, session)
    await until(lambda: backend.aborted)
    backend.done.set()
    await controller.operators.set_mode("draining", "eve")
    await until(lambda: not controller.queue.num_open)
    assert isinstance(await controller.answers.whole(request_id, 10), SampleOutput)


async def test_aborted_samples_cost_nothing_and_hold_no_memory(
    controller: Controller, backend: Slow
):
    await asked(controller, await controller.create_session())
    await until(lambda: backend.aborted)
    slots = next(iter(controller._samples._slots.values()))
    await until(lambda: not slots._used)
    assert not slots._queue._tenants and not controller._ledger.memory._running


async def test_a_sample_that_waits_for_its_client_can_be_cancelled(
    controller: Controller, backend: Slow
):
    session = await controller.create_session()
    request_id = await asked(controller, session)
    await until(lambda: backend.aborted)
    assert await controller.operators.cancel_request(request_id, "eve")
    result = await controller.answers.whole(request_id, 10)
    assert isinstance(result, Failure) and "cancelled by an operator" in result.message


async def test_the_next_controller_runs_samples_that_waited(tmp_path: Path, backend: Slow):
    first = controller_in(tmp_path, backend)
    await first.start()
    request_id = await asked(first, await first.create_session())
    await until(lambda: backend.aborted)
    await first.abandon()
    backend.done.set()
    second = controller_in(tmp_path, backend)
    await second.start()
    try:
        assert isinstance(await second.answers.whole(request_id, 10), SampleOutput)
    finally:
        await second.close()


def silent_after_a_second() -> tuple[Presence, TenantTable]:
    tenants = TenantTable()
    tenants.sessions["s"] = TenantSession("s", tenants.silence.mark_active(0.0))
    return Presence(tenants, lambda: False, 1.0), tenants


async def test_a_task_that_ends_at_the_moment_of_silence_is_not_cancelled_later():
    presence, _ = silent_after_a_second()

    async def work() -> str:
        async with presence.present("s"):
            with suppress(asyncio.CancelledError):  # as a library may do
                await asyncio.sleep(60)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        return "done"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    presence.check(5.0)
    assert await task == "done"


async def test_who_cancels_a_task_of_a_silent_session_is_obeyed():
    presence, _ = silent_after_a_second()
    seen: list[type[BaseException]] = []

    async def work() -> None:
        try:
            async with presence.present("s"):
                await asyncio.sleep(60)
        except BaseException as error:
            seen.append(type(error))
            raise

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    presence.check(5.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    alone = asyncio.create_task(work())
    await asyncio.sleep(0)
    presence._silent.clear()
    presence.check(5.0)
    with pytest.raises(FellSilent):
        await alone
    assert seen == [asyncio.CancelledError, FellSilent]
