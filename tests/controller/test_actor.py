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
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.transport.rpc import RpcClient
from tests.fakes import FakeBackend


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
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=tmp_path / "checkpoints",
        journal=JournalConfig(folder=tmp_path / "journal"),
    )
    made = actor.ControllerActor(config, {"tiny": str(tmp_path)}, False)
    client = RpcClient(lambda: made._rpc.address("127.0.0.1"), ControllerCalls)
    assert await client.call(ControllerCalls.fault) == "the service is still starting"
    await client.call(ControllerCalls.create_session, "s1", SessionLabels())
    lose(made.controller)
    async with asyncio.timeout(20):
        while len(backends) < 2 or made.controller.readiness.capabilities is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert made.controller.epoch == 2 and backends[0].calls[-1] == ("close", "")
    assert "it is lost" in made.progress
    await client.call(ControllerCalls.heartbeat, "s1")
    assert kept == ["kept", "kept"], "each start takes its objects out of the collector's view"
    with pytest.raises(NotFound):
        await client.call(ControllerCalls.retrieve, "r1", 0)
    await client.close()
    await made.close()
