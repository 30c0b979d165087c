"""Creates without capacity wait until sessions end or become silent, up to a bounded time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.backends.backend import AdapterMemory
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import (
    ClusterConfig,
    JournalConfig,
    LimitsConfig,
    LoraConfig,
    RestartConfig,
)
from skyrl_actors.controller import model_capacity
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.service_mode import ServiceMode
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import CapacityError, InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.messages.results import Waiting
from tests.fakes import FakeBackend

RANK = 4
ANN, BEN = "kaaaaaaaaaa", "kbbbbbbbbbb"  # marks of two API keys


class Backend(FakeBackend):
    """A backend with memory for `places` adapters of rank 4.

    The deletion of models in `held_up` blocks until they are removed from it.
    """

    def __init__(self, places: int = 2):
        super().__init__()
        self.adapters = AdapterMemory(places * RANK, 1)
        self.held_up: set[str] = set()

    async def delete_model(self, spec: ModelSpec) -> None:
        while spec.model_id in self.held_up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await super().delete_model(spec)


Make = Callable[..., Awaitable[Controller]]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Controller] = []

    async def new(
        backend: FakeBackend | None = None,
        lora: LoraConfig | None = None,
        restart: RestartConfig | None = None,
        session_silent_s: float = model_capacity.SESSION_SILENT_S,
        **limits: Any,
    ) -> Controller:
        config = ClusterConfig(
            base_model=TinyBase(name="tiny"),
            lora=lora or LoraConfig(),
            limits=LimitsConfig(**limits),
            restart=restart or RestartConfig(),
            checkpoint_dir=tmp_path / "checkpoints",
        )
        controller = Controller(
            config,
            backend or Backend(),
            SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS),
        )
        controller._capacity.session_silent_s = session_silent_s
        await controller.start()
        made.append(controller)
        return controller

    yield new
    for controller in made:
        await controller.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_capacity, "TICK_S", 0.02)


def spec_in(session: str, number: int = 0, rank: int | None = RANK) -> ModelSpec:
    return ModelSpec(
        model_id=f"{session}:train:{number}",
        base_model="tiny",
        lora=LoraSpec(rank=rank) if rank else None,
    )


async def asked(
    controller: Controller, session: str, number: int = 0, rank: int | None = RANK
) -> str:
    """Submit a create and return its request id."""
    await controller.create_session(session)
    return await controller.submit(
        rq.CreateModel(spec=spec_in(session, number, rank), session_id=session)
    )


async def done(controller: Controller, request_id: str) -> rs.Result:
    result = await controller.answers.whole(request_id, 5)
    assert result is not None, controller.answers.waiting(request_id)
    return result


async def waits(controller: Controller, request_id: str) -> Waiting:
    assert await controller.answers.whole(request_id, 0.05) is None
    return controller.answers.waiting(request_id)


async def test_a_create_without_capacity_waits_and_reports_the_reason(make: Make):
    controller = await make()
    for session in ("s0", "s1"):
        assert await done(controller, await asked(controller, session)) == rs.ModelCreated(
            f"{session}:train:0"
        )
    third = await asked(controller, "s2")
    waiting = await waits(controller, third)
    assert waiting.state == "paused_capacity" and "(lora.max_host_gib)" in (waiting.reason or "")
    status = await controller.status()
    assert (
        status["waiting_creates"] == 1
        and status["adapter_bytes"]["policy"] == 2 * RANK == status["adapter_bytes_limit"]
    )
    behind = await controller.submit(rq.OptimStep("s2:train:0", AdamParams()))
    await controller.finish_session("s0")
    assert await done(controller, third) == rs.ModelCreated("s2:train:0")
    assert await done(controller, behind) == rs.StepDone({})
    assert controller.answers.waiting(third) == Waiting()


async def test_capacity_is_counted_in_bytes(make: Make):
    controller = await make(Backend(3))
    await done(controller, await asked(controller, "s0", rank=9))
    assert (
        await waits(controller, await asked(controller, "s1", rank=4))
    ).state == "paused_capacity"
    await done(controller, await asked(controller, "s2", rank=3))


async def test_a_model_that_never_fits_is_refused_at_once(make: Make):
    controller = await make(lora=LoraConfig(max_full_models=0))
    with pytest.raises(
        InvalidRequest,
        match=r"rank 9 needs .* GiB of host memory, .* \(lora.max_host_gib\); use a lower rank",
    ):
        await asked(controller, "s0", rank=9)
    with pytest.raises(InvalidRequest, match="takes no full fine-tunes"):
        await asked(controller, "s0", rank=None)


async def test_full_fine_tunes_wait_for_each_other_and_not_for_adapters(make: Make):
    controller = await make(Backend(1))
    await done(controller, await asked(controller, "s0"))
    await done(controller, await asked(controller, "s1", rank=None))
    second = await asked(controller, "s2", rank=None)
    assert "1 of 1 policy full fine-tunes are alive (lora.max_full_models)" in str(
        (await waits(controller, second)).reason
    )
    await controller.finish_session("s0")
    assert (await waits(controller, second)).state == "paused_capacity"
    await controller.finish_session("s1")
    await done(controller, second)


async def test_only_as_many_silent_sessions_end_as_a_waiting_create_needs(
    make: Make,
):
    controller = await make(Backend(3), session_silent_s=0.3)
    await done(controller, await asked(controller, "s0"))
    await asyncio.sleep(0.1)
    for session in ("s1", "s2"):
        await done(controller, await asked(controller, session))
    await asyncio.sleep(0.4)
    assert len(controller.tenants.sessions) == 3  # silent, but no create waits
    await controller.heartbeat("s2")
    await done(controller, await asked(controller, "s3"))
    assert set(controller.tenants.sessions) == {"s1", "s2", "s3"}  # s0 was silent for longest


async def test_a_session_that_becomes_silent_while_a_create_waits_is_ended(make: Make):
    controller = await make(Backend(1), session_silent_s=0.3)
    await done(controller, await asked(controller, "s0"))
    waiting = await asked(controller, "s1")
    assert await waits(controller, waiting) != Waiting()
    await done(controller, waiting)
    assert set(controller.tenants.sessions) == {"s1"}


async def test_polling_for_an_answer_keeps_a_session_active(make: Make):
    controller = await make(Backend(1), session_silent_s=0.2)
    backend: Any = controller.backend
    await done(controller, await asked(controller, "s0"))
    backend.go.clear()
    step = await controller.submit(rq.OptimStep("s0:train:0", AdamParams()))
    waiting = await asked(controller, "s1")
    for _ in range(10):
        assert await controller.answers.whole(step, 0.05) is None
        assert await controller.answers.whole(waiting, 0) is None
    assert set(controller.tenants.sessions) == {"s0", "s1"}
    backend.go.set()
    assert await done(controller, step) == rs.StepDone({})


async def test_a_create_without_capacity_fails_after_a_bounded_time(make: Make):
    controller = await make(Backend(1), restart=RestartConfig(start_timeout_s=0.2))
    await done(controller, await asked(controller, "s0"))
    failed = await done(controller, await asked(controller, "s1"))
    assert (
        isinstance(failed, rs.Failure)
        and failed.category == "user"
        and failed.kind == "CapacityError"
    )
    assert (
        "no room for this model within 0.2 s (restart.start_timeout_s)" in failed.message
        and "End a session" in failed.message
    )
    assert set(controller.tenants.models) == {"s0:train:0"}
    backend: Any = controller.backend
    assert ("delete_model", "s1:train:0") not in backend.calls  # it was never created
    await controller.finish_session("s0")
    await done(controller, await asked(controller, "s1", 1))


async def test_a_pause_is_no_time_in_which_a_create_had_no_room(make: Make):
    controller = await make(Backend(1), restart=RestartConfig(start_timeout_s=0.3))
    await done(controller, await asked(controller, "s0"))
    waiting = await asked(controller, "s1")
    await asyncio.sleep(0.05)
    await controller.operators.set_mode("paused", "ann")
    await asyncio.sleep(0.5)
    assert await controller.answers.whole(waiting, 0) is None
    await controller.operators.set_mode("running", "ann")
    await asyncio.sleep(0.1)
    await controller.finish_session("s0")
    assert not isinstance(await done(controller, waiting), rs.Failure)


async def test_the_time_goes_on_after_a_pause():
    mode = ServiceMode()
    mode.set("paused")
    with pytest.raises(TimeoutError):
        async with mode.timeout(0.05):
            await asyncio.sleep(0.2)
            mode.set("running")
            await asyncio.sleep(5)


async def test_the_next_controller_resumes_a_waiting_create(make: Make):
    backend = Backend(1)
    first = await make(backend)
    await done(first, await asked(first, "s0"))
    waiting = await asked(first, "s1")
    later = await asked(first, "s2")
    assert await waits(first, waiting) != Waiting()
    await first.abandon()
    second = await make(backend)
    assert (
        (await waits(second, waiting)).state
        == (await waits(second, later)).state
        == "paused_capacity"
    )
    await second.finish_session("s0")
    assert await done(second, waiting) == rs.ModelCreated("s1:train:0")
    assert (await waits(second, later)).state == "paused_capacity"


async def test_a_model_that_the_ranks_hold_takes_no_capacity_twice(make: Make):
    """The create was executed, and its answer was lost with the controller."""
    backend = Backend(1)
    first = await make(backend)
    await first.create_session("s0")
    answer = first._ledger.answer  # type: ignore[reportPrivateUsage]

    async def never(*arguments: Any) -> None:
        await asyncio.Event().wait()

    first._ledger.answer = never  # type: ignore[reportPrivateUsage, method-assign]
    request_id = await asked(first, "s0")
    async with asyncio.timeout(5):
        while not backend.models:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await first.abandon()
    first._ledger.answer = answer  # type: ignore[reportPrivateUsage, method-assign]
    second = await make(backend)
    assert await done(second, request_id) == rs.ModelCreated("s0:train:0")
    assert (await waits(second, await asked(second, "s1"))).state == "paused_capacity"


async def test_capacity_is_granted_to_api_keys_in_rotation(make: Make):
    controller = await make(Backend(1))
    await done(controller, await asked(controller, "s0"))
    anns = [await asked(controller, f"s{i}a{ANN}") for i in range(3)]
    bens = [await asked(controller, f"s{i}b{BEN}") for i in range(2)]
    order = []
    for _ in range(5):
        (holder,) = [
            s for s in controller.tenants.sessions if controller._capacity.holds(f"{s}:train:0")
        ]  # type: ignore[reportPrivateUsage]
        await controller.finish_session(holder)
        async with asyncio.timeout(5):
            while not controller.backend.models:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0)
        (model_id,) = controller.backend.models  # type: ignore[attr-defined]
        order.append(model_id.split("k")[0])
    assert order == ["s0a", "s0b", "s1a", "s1b", "s2a"]
    for request_id in (*anns, *bens):
        assert isinstance(await done(controller, request_id), rs.ModelCreated)


async def test_a_slow_unload_does_not_delay_creates_that_fit(make: Make):
    backend = Backend(3)
    controller = await make(backend, session_silent_s=0.2)
    await done(controller, await asked(controller, "s0", rank=8))
    backend.held_up.add("s0:train:0")
    await asyncio.sleep(0.3)
    large = await asked(controller, "s1", rank=8)
    assert await waits(controller, large) != Waiting()
    async with asyncio.timeout(1):
        await done(controller, await asked(controller, "s2", rank=4))
    assert await waits(controller, large) != Waiting()
    backend.held_up.clear()
    await done(controller, large)


async def test_another_silent_session_ends_when_an_unload_takes_too_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_capacity, "SLOW_UNLOAD_S", 0.1)
    backend = Backend(2)
    controller = await make(backend, session_silent_s=0.2)
    for session in ("s0", "s1"):
        await done(controller, await asked(controller, session))
    backend.held_up.add("s0:train:0")
    await asyncio.sleep(0.3)
    await done(controller, await asked(controller, "s2"))
    assert set(controller.tenants.sessions) == {"s2"}
    backend.held_up.clear()


async def test_an_unload_that_waits_for_the_devices_is_not_called_slow(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_capacity, "SLOW_UNLOAD_S", 0.1)
    backend = Backend(3)
    elsewhere = ["another base model has the devices"]
    monkeypatch.setattr(backend, "waiting", lambda base: elsewhere[0] if elsewhere else None)
    controller = await make(backend, session_silent_s=0.2)
    for session in ("s0", "s1", "s2"):
        await done(controller, await asked(controller, session))
        backend.held_up.add(f"{session}:train:0")
    await asyncio.sleep(0.3)
    wanted = await asked(controller, "s3")
    for _ in range(10):
        await controller.heartbeat("s3")
        await asyncio.sleep(0.05)
    assert set(controller.tenants.sessions) == {"s1", "s2", "s3"}, "one is enough"
    elsewhere.clear()
    async with asyncio.timeout(5):
        while "s1" in controller.tenants.sessions:
            await controller.heartbeat("s3")
            await asyncio.sleep(0.02)
    backend.held_up.clear()
    await done(controller, wanted)


async def test_small_creates_do_not_overtake_a_large_one_forever(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_capacity, "PASSED_S", 0.2)
    controller = await make(Backend(2))
    await done(controller, await asked(controller, "s0", rank=4))
    large = await asked(controller, "s1", rank=8)
    await done(controller, await asked(controller, "s2", rank=1))  # it fits
    await asyncio.sleep(0.3)
    small = await asked(controller, "s3", rank=1)
    assert await waits(controller, small) != Waiting()
    await controller.finish_session("s2")
    assert await waits(controller, small) != Waiting()
    await controller.finish_session("s0")
    await done(controller, large)
    assert await waits(controller, small) != Waiting()


async def test_a_waiting_create_can_be_unloaded_and_its_session_finished(make: Make):
    controller = await make(Backend(1), session_silent_s=600)
    await done(controller, await asked(controller, "s0"))
    ids = [
        await asked(controller, "s0", 1),
        await controller.submit(rq.OptimStep("s0:train:1", AdamParams())),
    ]
    unloaded = await asked(controller, "s1")
    unload = await controller.submit(rq.Unload("s1:train:0"))
    failed = await done(controller, unloaded)
    assert (
        isinstance(failed, rs.Failure)
        and "was unloaded before there was room for it" in failed.message
    )
    assert await done(controller, unload) == rs.Unloaded("s1:train:0")
    async with asyncio.timeout(5):
        await controller.finish_session("s0")
    for request_id in ids:
        failed = await done(controller, request_id)
        assert (
            isinstance(failed, rs.Failure)
            and "session s0 was finished before this ran" in failed.message
        )
    assert not controller.tenants.models
    await done(controller, await asked(controller, "s2"))


async def test_other_models_of_a_session_run_while_its_create_waits(make: Make):
    controller = await make(Backend(1))
    await done(controller, await asked(controller, "s0"))
    waiting = await asked(controller, "s0", 1)
    assert await done(
        controller, await controller.submit(rq.OptimStep("s0:train:0", AdamParams()))
    ) == rs.StepDone({})
    await done(controller, await controller.submit(rq.Unload("s0:train:0")))
    assert await done(controller, waiting) == rs.ModelCreated("s0:train:1")


async def test_a_key_at_its_limit_of_models_is_refused_after_its_silent_sessions_end(make: Make):
    controller = await make(Backend(9), models_per_key=2, session_silent_s=0.2)
    backend: Any = controller.backend
    for i in range(2):
        await done(controller, await asked(controller, f"s{i}a{ANN}"))
    with pytest.raises(CapacityError, match="2 models of this API key are alive"):
        await asked(controller, f"s2a{ANN}")
    await done(controller, await asked(controller, f"s0b{BEN}"))
    await asyncio.sleep(0.25)
    backend.held_up.add(f"s0a{ANN}:train:0")  # its capacity counts as free during the unload
    async with asyncio.timeout(1):
        await done(controller, await asked(controller, f"s2a{ANN}"))
    assert (
        f"s0b{BEN}" in controller.tenants.sessions
        and f"s0a{ANN}" not in controller.tenants.sessions
    )
    backend.held_up.clear()


async def test_repeating_a_waiting_create_is_the_same_request(make: Make):
    controller = await make(Backend(1))
    await done(controller, await asked(controller, "s0"))
    assert await asked(controller, "s1") == await asked(controller, "s1")
    await controller.finish_session("s0")
    assert await done(controller, await asked(controller, "s1")) == rs.ModelCreated("s1:train:0")
