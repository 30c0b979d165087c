"""Loops that tidy: one job that fails ends neither its loop nor the others."""

import asyncio
from pathlib import Path
from typing import Any

from skyrl_actors.controller import housekeeping
from skyrl_actors.controller.tenants import Session, TenantTable


class Job:
    """Fails with what nobody foresaw, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def sweep(self, *_: Any) -> int:
        self.calls += 1
        raise KeyError("a damaged file")


class Records(Job):
    async def sweep(self) -> int:  # type: ignore[override]
        return super().sweep()


async def test_a_sweep_that_fails_ends_neither_its_loop_nor_the_others():
    folders, sessions, journal = Job(), Job(), Records()
    loop = asyncio.create_task(housekeeping.sweep(folders, sessions, journal, 0.001, 1.0))  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        while min(folders.calls, sessions.calls, journal.calls) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not loop.done()
    loop.cancel()


async def test_a_session_that_cannot_be_freed_does_not_keep_others_alive():
    tenants, freed = TenantTable(), asyncio.Queue[str]()
    for name in ("s1", "s2"):
        tenants.sessions[name] = Session(name, -1.0)

    async def finish(session_id: str) -> None:
        if session_id == "s1":
            raise KeyError(session_id)
        freed.put_nowait(session_id)

    loop = asyncio.create_task(housekeeping.free_silent_sessions(tenants, finish, 0.01))
    assert [await asyncio.wait_for(freed.get(), 10) for _ in range(2)] == ["s2", "s2"]
    loop.cancel()


def test_what_an_interrupted_write_left_goes_when_it_is_old(tmp_path: Path):
    import os

    from skyrl_actors.controller.notes import ABANDONED_S, sweep_abandoned

    old, new = tmp_path / ".run.json.1.partial", tmp_path / ".run.json.2.partial"
    for file in (old, new, tmp_path / "run.json"):
        file.write_text("")
    past = new.stat().st_mtime - ABANDONED_S - 60
    os.utime(old, (past, past))
    sweep_abandoned(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".run.json.2.partial", "run.json"]
