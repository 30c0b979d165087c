"""The actor around the controller, without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, TinyBase
from skyrl_actors.controller import actor
from tests.fakes import FakeBackend


async def test_a_journal_that_lost_commits_is_opened_anew_with_new_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    backends: list[FakeBackend] = []

    def build(*_: Any) -> FakeBackend:
        backends.append(FakeBackend())
        return backends[-1]

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(actor, "build_backend", build)
    monkeypatch.setattr(actor.remote, "publish", nothing)
    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        checkpoint_dir=tmp_path / "checkpoints",
        journal=JournalConfig(folder=tmp_path / "journal"),
    )
    made = actor.ControllerActor(config, str(tmp_path), False)
    await made.create_session("s1", {}, None)
    made.controller.journal.store.lost = "the database went back"  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        while len(backends) < 2 or made.controller.capabilities is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert made.controller.epoch == 2 and backends[0].calls[-1] == ("close", "")
    assert "the database went back" in made.progress
    await made.heartbeat("s1")
    await made.close()
