"""A process that wakes after another one has opened the journal destroys nothing."""

import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import opening, watchdog
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.packs import Pack, PackStore
from skyrl_actors.journal.retention import Retention
from skyrl_actors.journal.store import Fenced, Store
from skyrl_actors.journal.sweeping import Sweeper
from skyrl_actors.messages.errors import Unavailable
from tests.journal.test_journal import accepted, answered

pytestmark = pytest.mark.parametrize("config", ["postgres"], indirect=True)


def successor(journal: SqlJournal) -> Store:
    """Another process's store, not opened yet."""
    url = opening.database_url(journal.folder, journal.config.url)
    return Store(opening.connect(url), PackStore(journal.folder / opening.PACKS))


async def test_a_sweep_ends_when_another_service_has_begun(config: JournalConfig):
    old = SqlJournal(config, KINDS)
    await old.open("old")
    await old.write(accepted(1))
    steps = Sweeper(old.store, KINDS, Retention(10, 3), time.time(), (), set()).steps()
    next(steps)  # the sweep has begun; then the process stands still
    new = successor(old)
    new.begin_epoch("new", KINDS)
    write = new.packs.write

    def with_the_old_one_awake(pack: Pack) -> None:
        write(pack)
        with pytest.raises(Fenced, match="another service has opened this journal"):
            list(steps)

    new.packs.write = with_the_old_one_awake  # type: ignore[method-assign]
    new.write([accepted(2)])
    (operation,) = new.operations("s:train:0", 1, 9)
    assert operation.payload is not None
    assert (Path(new.packs.folder) / operation.payload.pack).is_file()
    new.close()
    await old.close()


async def test_a_snapshot_with_an_unknown_outcome_keeps_its_folder(config: JournalConfig):
    old = SqlJournal(config, KINDS)
    await old.open("old")
    await old.write(accepted(1), answered(1))
    engine, new, cuts = old.store.engine, successor(old), list[int]()
    commit = engine.dialect.do_commit
    killer = engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def do_commit(connection: Any) -> None:
        commit(connection)
        if not cuts:  # the database has it, the answer is lost, and another service begins
            cuts.append(connection.driver_connection.info.backend_pid)
            killer.execute(sa.text(f"SELECT pg_terminate_backend({cuts[0]})"))
            new.begin_epoch("new", KINDS)
            connection.execute("SELECT 1")

    engine.dialect.do_commit = do_commit  # pyright: ignore
    staging = await old.stage_snapshot("s:train:0", 1)
    (staging / "weights").write_text("x")
    with pytest.raises(Unavailable, match="another service has opened this journal"):
        await old.seal_snapshot(staging, "s:train:0", 1, 1)
    (taken,) = new.snapshots("s:train:0")
    assert (old.folder / opening.SNAPSHOTS / taken.folder).is_dir() and old.deposed
    new.close()
    await old.close()


async def test_a_slow_copy_of_a_pack_does_not_end_the_connection(
    config: JournalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "LONGEST_CALL_S", 0.5)
    mirrored = config.model_copy(update={"mirror": f"file://{tmp_path}/mirror"})
    journal = SqlJournal(mirrored, KINDS)
    await journal.open("x")
    assert journal._packs.mirror is not None
    put = journal._packs.mirror.put

    def slow(name: str, content: bytes) -> None:
        time.sleep(1.5)
        put(name, content)

    monkeypatch.setattr(journal._packs.mirror, "put", slow)
    await journal.write(accepted(1))
    assert [op.number for op in await journal.operations("s:train:0", 0, 9)] == [1]
    await journal.close()
