"""Operators list and cancel requests, end sessions, pause, drain and resume."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, HttpConfig, JournalConfig, LimitsConfig
from skyrl_actors.config.keys import hashed, owner_of_name
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import CapacityError, InvalidRequest, NotFound, Unavailable
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from tests.controller.test_controller import batch
from tests.fakes import FakeBackend

ANN = owner_of_name("ann", "")
ADAM = AdamParams(learning_rate=1e-3)


class SlowBackend(FakeBackend):
    """Steps and samples wait until `done` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.Event()

    async def optim_step(self, *arguments, **named):
        await self.done.wait()
        return await super().optim_step(*arguments, **named)

    async def sample(self, *arguments, **named):
        await self.done.wait()
        return await super().sample(*arguments, **named)


def controller_on(folder: Path, **limits: int) -> Controller:
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        http=HttpConfig(api_keys=(hashed("ann=tml-of-ann-123"),)),
        checkpoint_dir=folder / "checkpoints",
        limits=LimitsConfig(**limits),
    )
    journal = SqlJournal(JournalConfig(folder=folder / "journal"), KINDS)
    return Controller(config, SlowBackend(), journal)


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    made = controller_on(tmp_path)
    await made.start()
    yield made
    await made.close()


async def model_in(controller: Controller) -> tuple[str, str]:
    session = await controller.create_session(f"s1k{ANN}")
    spec = ModelSpec(model_id=f"{session}:train:0", base_model="tiny", lora=LoraSpec(rank=4))
    created = await controller.submit(rq.CreateModel(spec=spec, session_id=session), f"r0k{ANN}")
    assert isinstance(await controller.answers.whole(created, 5), rs.ModelCreated)
    return session, spec.model_id


async def step(controller: Controller, model_id: str, number: int) -> str:
    return await controller.submit(rq.OptimStep(model_id, ADAM, number), f"r{number}k{ANN}")


async def sample(controller: Controller, session: str, number: int) -> str:
    sampler = await controller.open_sampler(f"{session}:sample:0", session, "tiny", None)
    request = rq.Sample(
        sampler_id=sampler.sampler_id,
        prompt=(1, 2, 3),
        params=rq.SamplingParams(max_tokens=4, seed=1),
        seq_id=number,
    )
    return await controller.submit(request, f"r{100 + number}k{ANN}")


async def acts(controller: Controller) -> list[tuple[str, str]]:
    return [(entry.act, entry.subject) for entry in await controller.admin.log.audit(10)]


async def test_open_requests_are_listed_with_their_owner_and_state(controller: Controller):
    _, model_id = await model_in(controller)
    for number in (1, 2):
        await step(controller, model_id, number)
    await asyncio.sleep(0.05)
    found = await controller.operators.list_requests(None, 10)
    assert [(one.request_id, one.is_running, one.owner, one.target) for one in found] == [
        (f"r1k{ANN}", True, ANN, model_id),
        (f"r2k{ANN}", False, ANN, model_id),
    ]
    assert await controller.operators.list_requests("other", 10) == []
    assert len(await controller.operators.list_requests(ANN, 1)) == 1
    controller.backend.done.set()


async def test_a_queued_request_can_be_cancelled_and_a_running_one_not(controller: Controller):
    _, model_id = await model_in(controller)
    first, second, third = [await step(controller, model_id, number) for number in (1, 2, 3)]
    await asyncio.sleep(0.05)
    with pytest.raises(InvalidRequest, match=r"runs on the ranks.* and cannot be stopped"):
        await controller.operators.cancel_request(first, "eve")
    cancelling = asyncio.create_task(controller.operators.cancel_request(second, "eve"))
    await asyncio.sleep(0.05)
    controller.backend.done.set()
    assert await cancelling is True
    results = [await controller.answers.whole(one, 5) for one in (first, second, third)]
    assert [type(one) for one in results] == [rs.StepDone, rs.Failure, rs.StepDone]
    assert results[1].message == "cancelled by an operator" and results[1].category == "user"
    with pytest.raises(NotFound, match="no open request"):
        await controller.operators.cancel_request(second, "eve")
    assert await acts(controller) == [("cancel", f"OptimStep {second}")]


async def test_a_step_after_a_cancelled_forward_backward_is_refused(controller: Controller):
    """Otherwise it would apply a part of the batch."""
    _, model_id = await model_in(controller)
    await step(controller, model_id, 1)
    second = await controller.submit(batch(model_id, seq_id=2))
    third = await step(controller, model_id, 3)
    cancelling = asyncio.create_task(controller.operators.cancel_request(second, "eve"))
    await asyncio.sleep(0.05)
    controller.backend.done.set()
    assert await cancelling
    refused = await controller.answers.whole(third, 5)
    assert isinstance(refused, rs.Failure) and "cancelled by an operator" in refused.message


async def test_a_running_sample_can_be_cancelled(controller: Controller):
    session, _ = await model_in(controller)
    request_id = await sample(controller, session, 0)
    await asyncio.sleep(0.05)
    assert await controller.operators.cancel_request(request_id, "eve")
    result = await controller.answers.whole(request_id, 5)
    assert isinstance(result, rs.Failure) and result.message == "cancelled by an operator"


async def test_an_ended_session_is_freed_and_recorded(controller: Controller):
    controller.backend.done.set()
    session, model_id = await model_in(controller)
    await controller.operators.end_session(session, "eve")
    assert model_id not in controller.tenants.models
    with pytest.raises(NotFound, match="unknown session"):
        await controller.operators.end_session(session, "eve")
    entry = await controller.session_catalog("session", session)
    assert entry.status == "interrupted" and entry.note.detail == "ended by an operator"
    assert await acts(controller) == [("end", session)]


async def test_ending_a_session_does_not_wait_for_its_running_request(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.controller.operators.ANSWER_S", 0.2)
    session, model_id = await model_in(controller)
    stepped = await step(controller, model_id, 1)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await controller.operators.end_session(session, "eve")
    assert session not in controller.tenants.sessions and model_id in controller.tenants.models
    controller.backend.done.set()  # type: ignore[attr-defined]
    assert isinstance(await controller.answers.whole(stepped, 5), rs.StepDone)
    async with asyncio.timeout(5):
        while model_id in controller.tenants.models:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_sessions_at_once_do_not_exceed_their_number(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.controller.session_start.SESSIONS_PER_KEY", 5)
    ids = [f"s{number}k{ANN}" for number in range(20)]
    # each twice: a repeat waits for the first, and gets the same session
    opened = await asyncio.gather(
        *(controller.create_session(one) for one in (*ids, *ids)), return_exceptions=True
    )
    refused = [one for one in opened if isinstance(one, CapacityError)]
    assert len(controller.tenants.sessions) == 5 and len(refused) == 30
    assert controller.journal.trouble is None


async def test_a_paused_service_accepts_and_runs_later_also_after_a_restart(tmp_path: Path):
    controller = controller_on(tmp_path)
    await controller.start()
    controller.backend.done.set()
    session, model_id = await model_in(controller)
    assert await controller.operators.set_mode("paused", "eve") == "running"
    stepped, sampled = await step(controller, model_id, 1), await sample(controller, session, 0)
    assert await controller.answers.whole(stepped, 0.2) is None
    waiting = await controller.answers.retrieve(sampled, 0.2)
    assert isinstance(waiting, rs.Waiting) and waiting.state == "paused_capacity"
    assert (waiting.reason or "").startswith("paused: an operator")
    await controller.close()

    again = controller_on(tmp_path)
    await again.start()
    again.backend.done.set()
    assert (await again.status())["mode"] == "paused"
    assert await again.answers.whole(stepped, 0.2) is None
    assert await again.operators.set_mode("running", "eve") == "paused"
    assert isinstance(await again.answers.whole(stepped, 5), rs.StepDone)
    assert isinstance(await again.answers.whole(sampled, 5), rs.SampleOutput)
    assert [act for act, _ in await acts(again)] == ["pause", "resume"]
    await again.close()


async def test_a_paused_service_ends_sessions_and_cancels_requests(controller: Controller):
    controller.backend.done.set()
    session, model_id = await model_in(controller)
    await controller.operators.set_mode("paused", "eve")
    first = await step(controller, model_id, 1)
    assert await controller.operators.cancel_request(first, "eve")
    queued = await step(controller, model_id, 2)
    async with asyncio.timeout(5):
        await controller.operators.end_session(session, "eve")
    failed = await controller.answers.whole(queued, 5)
    assert isinstance(failed, rs.Failure) and model_id not in controller.tenants.models


async def test_a_drained_service_completes_and_accepts_nothing_new(controller: Controller):
    session, model_id = await model_in(controller)
    accepted = await step(controller, model_id, 1)
    await controller.operators.set_mode("draining", "eve")
    for attempt in (
        lambda: step(controller, model_id, 2),
        lambda: sample(controller, session, 0),
        lambda: controller.create_session("s2"),
    ):
        with pytest.raises(Unavailable, match="is being drained"):
            await attempt()
    assert await step(controller, model_id, 1) == accepted  # a repeat
    assert await controller.create_session(session) == session
    controller.backend.done.set()
    assert isinstance(await controller.answers.whole(accepted, 5), rs.StepDone)
    await controller.operators.set_mode("running", "eve")
    assert isinstance(
        await controller.answers.whole(await step(controller, model_id, 2), 5), rs.StepDone
    )
    (drained, _) = await acts(controller)
    assert drained == ("drain", "1 sessions, 1 open requests")


async def test_only_the_end_of_the_service_ends_a_drain(tmp_path: Path):
    async def mode_after(end: str) -> str:
        controller = controller_on(tmp_path)
        await controller.start()
        await controller.operators.set_mode("draining", "eve")
        if end == "stop":
            await controller.operators.end_drain()
            acts = [entry.act for entry in await controller.admin.log.audit(9)]
            assert acts[-2:] == ["drain", "resume"]
        await (controller.abandon() if end == "crash" else controller.close())
        again = controller_on(tmp_path)
        await again.start()
        mode = again.admin.mode.mode
        await again.close()
        return mode

    assert await mode_after("crash") == "draining"
    assert await mode_after("ranks and engines that are started again") == "draining"
    assert await mode_after("stop") == "running"


async def test_reads_of_a_published_checkpoint_are_recorded_once_an_hour(controller: Controller):
    log = controller.admin.log
    for _ in range(3):
        await log.note_access("read", ANN, "tinker://m/weights/one")
    await log.note_access("publish", ANN, "tinker://m/weights/one")
    await log.note_access("expire", ANN, "tinker://m/weights/two")
    await log.note_access("read", ANN, "tinker://m/weights/two")  # another act hides no read
    found = await log.audit(10)
    assert [(one.act, one.actor) for one in found] == [
        ("read", "key of ann"),
        ("publish", "key of ann"),
        ("expire", "key of ann"),
        ("read", "key of ann"),
    ]
    assert await log.audit(10, since=found[-1].at + 1) == []
    assert await log.audit(10, until=found[0].at) == []


def test_names_replace_owners_in_the_status(tmp_path: Path):
    keys = controller_on(tmp_path).admin.keys
    assert keys.label(ANN) == "ann" and keys.label("0123456789") == "0123456789"


async def test_an_unload_cannot_be_cancelled(controller: Controller):
    """Its model would stay in the ranks, and its memory would count as free."""
    _, model_id = await model_in(controller)
    await step(controller, model_id, 1)
    unload = await controller.submit(rq.Unload(model_id), f"r9k{ANN}")
    with pytest.raises(InvalidRequest, match="frees a model; it cannot be cancelled"):
        await controller.operators.cancel_request(unload, "eve")
    controller.backend.done.set()
    assert isinstance(await controller.answers.whole(unload, 5), rs.Unloaded)
    assert model_id not in controller.backend.models


async def test_a_request_that_is_cancelled_does_not_run_meanwhile(controller: Controller):
    """The record of the act takes a while to be written."""
    _, model_id = await model_in(controller)
    first, second = await step(controller, model_id, 1), await step(controller, model_id, 2)
    await asyncio.sleep(0.05)
    cancelling = asyncio.create_task(controller.operators.cancel_request(second, "eve"))
    await asyncio.sleep(0)
    controller.backend.done.set()
    assert await cancelling
    assert isinstance(await controller.answers.whole(first, 5), rs.StepDone)
    failed = await controller.answers.whole(second, 5)
    assert isinstance(failed, rs.Failure) and failed.message == "cancelled by an operator"


async def test_a_pause_stops_samples_that_wait_for_a_place(tmp_path: Path):
    controller = controller_on(tmp_path, samples_in_flight=1)
    await controller.start()
    session, _ = await model_in(controller)
    first, second = [await sample(controller, session, number) for number in (0, 1)]
    await asyncio.sleep(0.05)
    await controller.operators.set_mode("paused", "eve")
    controller.backend.done.set()
    assert isinstance(await controller.answers.whole(first, 5), rs.SampleOutput)
    assert await controller.answers.whole(second, 0.3) is None
    await controller.operators.set_mode("running", "eve")
    assert isinstance(await controller.answers.whole(second, 5), rs.SampleOutput)
    await controller.close()


async def test_a_session_ends_under_a_flood_while_the_service_is_paused(controller: Controller):
    controller.backend.done.set()
    session, model_id = await model_in(controller)
    await controller.operators.set_mode("paused", "eve")

    async def flood() -> None:
        for number in range(1, 1000):
            try:
                await step(controller, model_id, number)
            except NotFound:
                return

    flooding = asyncio.create_task(flood())
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await controller.operators.end_session(session, "eve")
        await flooding
    assert model_id not in controller.tenants.models


async def test_a_read_is_possible_while_the_journal_cannot_write(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: object) -> None:
        raise Unavailable("no space left")

    monkeypatch.setattr(controller.journal, "write", refuse)
    await controller.admin.log.note_access("read", ANN, "tinker://m/weights/one")
    with pytest.raises(Unavailable):
        await controller.admin.log.note_access("publish", ANN, "tinker://m/weights/one")
    monkeypatch.undo()
