"""The controller's actor class, without Ray."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller import actor
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.errors import ConfigError, NotFound, Unavailable
from skyrl_actors.transport.rpc import RpcClient
from tests.fakes import FakeBackend


def config_in(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=folder / "checkpoints",
        journal=JournalConfig(folder=folder / "journal"),
    )


def _lose_journal_entries(controller: Any) -> None:
    controller.journal.store.lost = "it is lost"


def _lose_slots(controller: Any) -> None:
    controller.backend.lost = "it is lost"


@pytest.mark.parametrize("lose", [_lose_journal_entries, _lose_slots])
async def test_the_service_restarts_after_losing_journal_entries_or_slots(
    lose: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backends: list[FakeBackend] = []

    def build(*_: Any) -> FakeBackend:
        backends.append(FakeBackend())
        return backends[-1]

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(actor, "build_backend", build)
    monkeypatch.setattr(actor.remote, "publish", nothing)
    monkeypatch.setattr(actor, "POLL_S", 0.01)
    kept: list[str] = []
    monkeypatch.setattr(actor.heap, "keep_present_objects", lambda: kept.append("kept"))
    config = config_in(tmp_path)
    made = actor.ControllerActor(config, {"tiny": str(tmp_path)}, False)
    client = RpcClient(lambda: made._rpc.address("127.0.0.1"), ControllerCalls)
    assert await client.call(ControllerCalls.fault) == "the service is still starting"
    await client.call(ControllerCalls.create_session, "s1", SessionLabels())
    await made.controller.operators.set_mode("draining", "eve")
    lose(made.controller)
    async with asyncio.timeout(20):
        while len(backends) < 2 or made.controller.readiness.capabilities is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert made.controller.epoch == 2 and backends[0].calls[-1] == ("close", "")
    assert "it is lost" in made.progress
    await client.call(ControllerCalls.heartbeat, "s1")
    assert made.controller.admin.mode.mode == "draining", "an operator ends it, or the service ends"
    assert kept == ["kept", "kept"], "each start takes its objects out of the collector's view"
    with pytest.raises(NotFound):
        await client.call(ControllerCalls.retrieve, "r1", 0)
    await client.close()
    await made.close()
    stopped = await made.controller.journal.open("x")
    assert stopped.mode == "running", "the next service accepts requests"
    await made.controller.journal.close()


def process_in(folder: Path) -> actor.ControllerActor:
    return actor.ControllerActor(config_in(folder), {"tiny": str(folder)}, False, "the other")


@pytest.fixture
async def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both processes of a controller, which has started in the first one."""

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(actor, "build_backend", lambda *_: FakeBackend())
    monkeypatch.setattr(actor.remote, "publish", nothing)
    monkeypatch.setattr(actor.remote, "named", lambda name: None)
    monkeypatch.setattr(actor.Standby, "end", nothing)
    monkeypatch.setattr("skyrl_actors.transport.rpc_server.node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actor, "ACTIVE_S", 0.1)
    monkeypatch.setattr(actor, "AFTER_FAILURE_S", 0.1)
    monkeypatch.setattr(actor.heap, "keep_present_objects", lambda: None)
    first, second = process_in(tmp_path), process_in(tmp_path)
    await first.start()
    yield first, second
    await first.close()
    await second.close()


async def test_the_second_process_has_no_address_until_the_first_one_ends(
    two: Any, monkeypatch: pytest.MonkeyPatch
):
    first, second = two
    client = RpcClient(lambda: first.get_rpc_address("127.0.0.1"), ControllerCalls)
    await client.call(ControllerCalls.create_session, "s1", SessionLabels())
    assert await second.get_rpc_address("127.0.0.1") is None
    monkeypatch.setattr(actor, "ACTIVE_S", 30.0)
    assert await second.stand_by() == actor.own_process()
    asked = asyncio.create_task(second.get_rpc_address("127.0.0.1"))
    await first.close()
    client = RpcClient(lambda: asked, ControllerCalls)
    await client.call(ControllerCalls.heartbeat, "s1")
    assert second.controller.epoch == 2
    await client.close()


async def test_a_process_that_cannot_start_lets_the_other_one_try(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = two
    monkeypatch.setattr(actor, "ACTIVE_S", 30.0)
    failing = second.controller

    async def fails(wait: bool) -> Any:
        await failing.journal.open("x", wait)
        failing.opened.set()
        raise Unavailable("no engine starts")

    failing.start = fails
    address = asyncio.create_task(second.get_rpc_address("127.0.0.1"))
    await first.close()
    client = RpcClient(lambda: address, ControllerCalls)
    with pytest.raises(Unavailable, match="the service does not start: no engine starts"):
        await client.call(ControllerCalls.heartbeat, "s1")
    again = process_in(tmp_path)
    await again.get_rpc_address("127.0.0.1")
    async with asyncio.timeout(30):
        while again.controller.readiness.capabilities is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(actor.HANG_UP_S)
    assert second._rpc.callers == set(), "clients stay connected to a process that is not active"
    await again.close()


async def test_one_service_cannot_take_the_journal_of_another(two: Any, tmp_path: Path):
    other = actor.ControllerActor(config_in(tmp_path), {"tiny": str(tmp_path)}, False)
    with pytest.raises(ConfigError, match="in use by service 'skyrl-actors'"):
        await other.start()


async def test_a_process_without_the_journal_ends_also_while_it_starts(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, _ = two
    await first.close()
    starting = process_in(tmp_path)
    ends = asyncio.Event()
    monkeypatch.setattr(actor.os, "_exit", lambda code: ends.set())
    monkeypatch.setattr(actor, "POLL_S", 0.01)

    async def never(_: int) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(starting.controller.backend, "start", never)
    await starting.get_rpc_address("127.0.0.1")
    assert starting.controller.readiness.capabilities is None
    starting.controller.journal.store.fenced = "another one has it"
    await asyncio.wait_for(ends.wait(), 5)
    await actor.ended(starting._starting, starting._guarding)


async def test_clients_leave_a_process_that_lost_its_journal_entries(
    two: Any, monkeypatch: pytest.MonkeyPatch
):
    first, second = two
    monkeypatch.setattr(actor, "POLL_S", 0.01)
    client = RpcClient(lambda: first.get_rpc_address("127.0.0.1"), ControllerCalls)
    await client.call(ControllerCalls.create_session, "s1", SessionLabels())
    waiting = asyncio.create_task(second.get_rpc_address("127.0.0.1"))
    first._watching.cancel()
    first._watching = asyncio.create_task(first._watch())
    _lose_slots(first.controller)
    async with asyncio.timeout(10):
        while first._rpc.callers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while not (second.controller.opened.is_set() or first.controller.opened.is_set()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    waiting.cancel()
