"""Housekeeping loops: silent sessions, sweeps, clocks, abandoned files."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_actors.clock import SteadyClock
from skyrl_actors.config.base_models import TinyBase
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig, LimitsConfig
from skyrl_actors.controller import housekeeping
from skyrl_actors.controller.checkpoints import SPEC_FILE, CheckpointFolders
from skyrl_actors.controller.controller import Controller
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.tenants import TenantSession, TenantTable
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.entries import Accepted, Answered
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath
from skyrl_actors.messages.requests import Sample, SamplingParams
from skyrl_actors.messages.results import Loaded
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend


class Job:
    """Fail with an unexpected exception, and count the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def sweep(self, *_: Any) -> int:
        self.calls += 1
        raise KeyError("a damaged file")

    @property
    def removal(self) -> "Job":
        return self

    expired = sweep


class Records(Job):
    async def sweep(self, unfreed: Collection[str] = ()) -> int:  # type: ignore[override]
        return super().sweep()


async def test_a_failed_sweep_ends_neither_its_loop_nor_the_other_sweeps():
    folders, sessions, journal = Job(), Job(), Records()
    context: Any = SimpleNamespace(
        folders=folders, disk=Disk(), backend=FakeBackend(), config=ClusterConfig()
    )
    loop = asyncio.create_task(housekeeping.sweep(context, sessions, journal, 0.001))  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        while min(folders.calls, sessions.calls, journal.calls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not loop.done()
    loop.cancel()


async def test_a_sweep_leaves_the_samplers_whose_files_are_not_freed():
    """So that a start after a kill frees them."""
    backend, known = FakeBackend(), list[Collection[str]]()
    backend.left.append(SamplerWeights(version="m@1"))

    class Swept(Records):
        async def sweep(self, unfreed: Collection[str] = ()) -> int:  # type: ignore[override]
            known.append(unfreed)
            return 0

    context: Any = SimpleNamespace(
        folders=Job(), disk=Disk(), backend=backend, config=ClusterConfig()
    )
    loop = asyncio.create_task(housekeeping.sweep(context, Job(), Swept(), 0.001))  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        while not known:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    loop.cancel()
    assert known[0] == {"m@1"}


async def test_a_session_that_cannot_be_freed_does_not_block_freeing_others():
    tenants, freed = TenantTable(), asyncio.Queue[str]()
    for name in ("s1", "s2"):
        tenants.sessions[name] = TenantSession(name, -1.0)

    async def finish(session_id: str) -> None:
        if session_id == "s1":
            raise KeyError(session_id)
        freed.put_nowait(session_id)

    loop = asyncio.create_task(housekeeping.free_silent_sessions(tenants, finish, 0.01))
    assert [await asyncio.wait_for(freed.get(), 10) for _ in range(2)] == ["s2", "s2"]
    loop.cancel()


def beat(tenants: TenantTable, first: float, last: float, *names: str) -> None:
    """Record heartbeats of these sessions every 10 s."""
    for now in range(int(first), int(last), 10):
        for name in names:
            tenants.mark_active(name, float(now))


def test_an_outage_of_the_edge_ends_no_session():
    """No heartbeat arrives for an hour. Then all clients return, one of them later."""
    tenants = TenantTable()
    for name in ("s1", "s2", "gone"):
        tenants.sessions[name] = TenantSession(name, tenants.silence.mark_active(0.0))
    beat(tenants, 0, 100, "s1", "s2")
    assert tenants.silent_sessions(100.0, 60.0) == ["gone"]
    assert (
        tenants.silent_sessions(3700.0, 60.0) == ["gone"]
        and tenants.silent_sessions(3700.0, 600.0) == []
    )
    beat(tenants, 3700, 3740, "s1")
    assert tenants.silent_sessions(3740.0, 60.0) == ["gone"]
    tenants.mark_active("s2", 3741.0)
    beat(tenants, 3750, 4300, "s1")
    assert tenants.silent_sessions(4300.0, 600.0) == ["gone"]
    assert tenants.silent_sessions(4300.0, 540.0) == ["gone", "s2"]


async def test_a_service_without_any_client_keeps_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Sessions stay while all are silent; one that is silent alone ends. The gap is shortened."""
    monkeypatch.setattr("skyrl_actors.controller.silence.LONGEST_GAP_S", 0.05)
    config = ClusterConfig(
        base_model=TinyBase(name="tiny"),
        limits=LimitsConfig(session_timeout_s=0.3),
        checkpoint_dir=tmp_path / "checkpoints",
    )
    controller = Controller(
        config, FakeBackend(), SqlJournal(JournalConfig(folder=tmp_path / "journal"), KINDS)
    )
    await controller.start()
    lives, dies = await controller.create_session(), await controller.create_session()
    await asyncio.sleep(1.0)
    assert controller.tenants.sessions.keys() == {lives, dies}
    async with asyncio.timeout(20):
        while dies in controller.tenants.sessions:
            await controller.heartbeat(lives)
            await asyncio.sleep(0.01)
    assert lives in controller.tenants.sessions
    await controller.close()


async def test_setting_the_wall_clock_does_not_change_lifetimes_and_retention(tmp_path: Path):
    wall, elapsed = [1e9], [0.0]
    now = SteadyClock(lambda: wall[0], lambda: elapsed[0])
    config = JournalConfig(folder=tmp_path / "journal", retention_s=3600.0)
    journal = SqlJournal(config, KINDS, now)
    await journal.open("x")
    sample = Sample(sampler_id="s:sample:0", prompt=(1,), params=SamplingParams(max_tokens=1))
    await journal.write(
        Accepted(
            number=1,
            request_id="r1",
            stream="s:sample:0",
            seq_id=1,
            digest=7,
            model_id=None,
            session_id="s",
            accepted_at=now(),
            request=sample,
        )
    )
    await journal.write(
        Answered(
            number=1, request_id="r1", result=Loaded("m", "p"), effect="none", answered_at=now()
        )
    )
    folders = CheckpointFolders(tmp_path / "checkpoints", now)
    folder = folders.folder(TinkerPath("s:train:0", "weights", "a"))
    folder.mkdir(parents=True)
    (folder / SPEC_FILE).write_text("{}")
    folders.note_run(ModelSpec(model_id="s:train:0", base_model="tiny"), "s", {})
    folders.note(folder, {}, 3600)
    for jump in (1e9, -2e9):
        wall[0] += jump
        await journal.sweep()
        found = await journal.find("r1")
        assert found is not None and await journal.result(found) == Loaded("m", "p")
        assert await housekeeping.sweep_checkpoints(folders, Disk()) == 0 and folder.exists()
    elapsed[0] += 3601
    await journal.sweep()
    found = await journal.find("r1")
    assert found is None or found.result is None
    assert await housekeeping.sweep_checkpoints(folders, Disk()) == 1
    await journal.close()


def test_old_files_of_interrupted_writes_are_removed(tmp_path: Path):
    import os

    from skyrl_actors.controller.notes import ABANDONED_S, sweep_abandoned

    old, new = tmp_path / ".run.json.1.partial", tmp_path / ".run.json.2.partial"
    for file in (old, new, tmp_path / "run.json"):
        file.write_text("")
    past = new.stat().st_mtime - ABANDONED_S - 60
    os.utime(old, (past, past))
    sweep_abandoned(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".run.json.2.partial", "run.json"]
