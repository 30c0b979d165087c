"""A journal whose files are also in remote storage outlives its folder. The S3 server is real."""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import sqlalchemy as sa

from skyrl_actors.commands.backup import backup
from skyrl_actors.commands.restore import check, restore
from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import opening
from skyrl_actors.journal.entries import JournalState, Operation, SessionOpened
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.errors import ConfigError, Corrupt, Unavailable
from skyrl_actors.messages.requests import CreateModel
from skyrl_actors.storage.objects import Objects
from tests.journal.test_journal import SPEC, accepted, answered
from tests.journal.test_sweeping import done, sample

MODEL = "s:train:0"
CREATION = CreateModel(spec=SPEC, session_id="s")


def execute(url: str, *statements: str) -> None:
    server = sa.create_engine(opening.database_url(Path(), url), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    server.dispose()


@pytest.fixture(params=["file", "s3"])
def mirrored(request: pytest.FixtureRequest, postgres: str, tmp_path: Path) -> JournalConfig:
    """The config of an empty journal in PostgreSQL, with a mirror of each kind."""
    name = f"m{time.time_ns()}"
    execute(postgres, f"CREATE DATABASE {name}")
    mirror = (
        (tmp_path / "there").as_uri()
        if request.param == "file"
        else f"{request.getfixturevalue('s3')}/{name}"
    )
    return JournalConfig(
        folder=tmp_path / "journal",
        url=postgres.replace("/postgres?", f"/{name}?"),
        mirror=mirror,
    )


async def opened(config: JournalConfig) -> tuple[SqlJournal, JournalState]:
    journal = SqlJournal(config, KINDS)
    return journal, await journal.open("x")


async def filled(config: JournalConfig) -> Operation:
    """Write a journal with an answered operation and a snapshot after it, and return the first."""
    journal, _ = await opened(config)
    await journal.write(accepted(1, CREATION))
    await journal.write(answered(1))
    staging = await journal.stage_snapshot(MODEL, 1)
    (staging / "rank0.bin").write_bytes(b"weights")
    await journal.seal_snapshot(staging, MODEL, 1, 0)
    (operation,) = await journal.operations(MODEL, 0, 9)
    await journal.close()
    return operation


def lose(config: JournalConfig) -> None:
    shutil.rmtree(config.folder)


async def test_an_empty_folder_is_filled_from_the_mirror(mirrored: JournalConfig):
    operation = await filled(mirrored)
    lose(mirrored)
    SqlJournal(mirrored, KINDS).check()
    journal, state = await opened(mirrored)
    assert state.epoch == 2 and state.next_number == 2
    assert await journal.operations(MODEL, 0, 9) == [operation]
    assert await journal.request(operation) == CREATION
    assert (await journal.result(operation)) is not None
    (snapshot,) = await journal.snapshots(MODEL)
    folder = await journal.verified_snapshot(snapshot)
    assert (folder / "rank0.bin").read_bytes() == b"weights"
    await journal.write(accepted(2))
    await journal.close()


async def test_damaged_files_are_fetched_again_and_loss_on_both_sides_is_named(
    mirrored: JournalConfig,
):
    operation = await filled(mirrored)
    journal, _ = await opened(mirrored)
    (snapshot,) = await journal.snapshots(MODEL)
    packs = mirrored.folder / "packs"
    for file in packs.iterdir():
        file.write_bytes(b"?")
    weights = mirrored.folder / "snapshots" / snapshot.folder / "rank0.bin"
    weights.write_bytes(b"?")
    assert await journal.request(operation) == CREATION
    await journal.verified_snapshot(snapshot)
    assert weights.read_bytes() == b"weights"
    assert mirrored.mirror is not None and operation.payload is not None
    Objects(mirrored.mirror).remove([f"packs/{operation.payload.pack}"])
    (packs / operation.payload.pack).unlink()
    with pytest.raises(Corrupt, match="is missing"):
        await journal.request(operation)
    await journal.close()


async def test_a_mirror_is_added_to_a_journal_with_all_that_it_has(mirrored: JournalConfig):
    operation = await filled(mirrored.model_copy(update={"mirror": None}))
    journal, _ = await opened(mirrored)
    await journal.close()
    lose(mirrored)
    journal, state = await opened(mirrored)
    assert state.epoch == 3
    assert await journal.request(operation) == CREATION
    (snapshot,) = await journal.snapshots(MODEL)
    await journal.verified_snapshot(snapshot)
    await journal.close()


async def test_nothing_is_accepted_that_the_mirror_does_not_have(
    mirrored: JournalConfig, monkeypatch: pytest.MonkeyPatch
):
    journal, _ = await opened(mirrored)

    def fails(*_: object) -> None:
        raise OSError("no network")

    with monkeypatch.context() as broken:
        broken.setattr(Objects, "put", fails)
        broken.setattr(Objects, "put_folder", fails)
        with pytest.raises(Unavailable, match="no network"):
            await journal.write(accepted(1))
        staging = await journal.stage_snapshot(MODEL, 1)
        (staging / "rank0.bin").write_bytes(b"weights")
        with pytest.raises(Unavailable, match="no network"):
            await journal.seal_snapshot(staging, MODEL, 1, 0)
    assert await journal.operations(MODEL, 0, 9) == []
    assert await journal.snapshots(MODEL) == []
    await journal.write(accepted(1))
    assert len(await journal.operations(MODEL, 0, 9)) == 1
    await journal.close()


async def test_what_is_swept_is_removed_from_the_mirror_too(mirrored: JournalConfig):
    config = mirrored.model_copy(update={"retention_s": 0.001})
    await filled(config)
    assert config.mirror is not None
    there = Objects(config.mirror)
    journal, _ = await opened(config)
    there.put("packs/of-an-interrupted-write", b"x")
    await journal.sweep()
    names = set(there.names("packs"))
    assert "of-an-interrupted-write" not in names
    assert names == {file.name for file in (config.folder / "packs").iterdir()}
    assert len(there.names("snapshots")) == 1
    await journal.close()


async def test_the_mirror_of_another_journal_is_refused(mirrored: JournalConfig, tmp_path: Path):
    await filled(mirrored)
    assert mirrored.mirror is not None
    other = JournalConfig(folder=tmp_path / "other")
    journal = SqlJournal(other, KINDS)
    await journal.open("x")
    await journal.close()
    mixed = other.model_copy(update={"mirror": mirrored.mirror})
    for take in (SqlJournal(mixed, KINDS).check, lambda: asyncio.run(opened(mixed))):
        with pytest.raises(ConfigError, match=r"mirrors journal .* set another journal\.mirror"):
            await asyncio.to_thread(take)


def test_a_mirror_without_a_database_elsewhere_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="mirror without url"):
        JournalConfig(folder=tmp_path, mirror="s3://bucket/journal")


async def test_a_backup_has_files_that_only_the_mirror_has(mirrored: JournalConfig, tmp_path: Path):
    await filled(mirrored)
    config = tmp_path / "config.yaml"
    config.write_text("base_model: {type: tiny, name: tiny}\n")

    def named(journal: JournalConfig, checkpoints: str) -> list[str]:
        return [
            f"journal.folder={journal.folder}",
            f"journal.url={journal.url}",
            f"journal.mirror={journal.mirror}",
            f"checkpoint_dir={tmp_path / checkpoints}",
        ]

    for file in (mirrored.folder / "packs").iterdir():
        file.unlink()
    (tmp_path / "checkpoints").mkdir()
    options = named(mirrored, "checkpoints")
    await asyncio.to_thread(backup, config, tmp_path / "copy", options, None)
    assert await asyncio.to_thread(check, tmp_path / "copy", [])
    assert await asyncio.to_thread(check, config, options)
    lose(mirrored)
    assert mirrored.url is not None
    execute(mirrored.url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match=r"has a journal already; set another journal\.mirror"):
        await asyncio.to_thread(restore, tmp_path / "copy", config, options)


async def test_files_of_a_time_without_the_mirror_are_copied_when_it_is_back(
    mirrored: JournalConfig,
):
    journal, _ = await opened(mirrored)
    await journal.close()
    operation = await filled(mirrored.model_copy(update={"mirror": None}))
    journal, _ = await opened(mirrored)
    await journal.close()
    lose(mirrored)
    journal, _ = await opened(mirrored)
    assert await journal.request(operation) == CREATION
    (snapshot,) = await journal.snapshots(MODEL)
    await journal.verified_snapshot(snapshot)
    await journal.close()


async def test_an_outage_of_the_mirror_is_no_damage_and_what_it_keeps_is_removed_later(
    mirrored: JournalConfig, monkeypatch: pytest.MonkeyPatch
):
    operation = await filled(mirrored)
    assert mirrored.mirror is not None
    there = Objects(mirrored.mirror)
    lose(mirrored)
    journal, _ = await opened(mirrored)
    (snapshot,) = await journal.snapshots(MODEL)

    def fails(*_: object) -> None:
        raise OSError("no network")

    with monkeypatch.context() as broken:
        for name in ("get", "get_folder", "remove_files"):
            broken.setattr(Objects, name, fails)
        with pytest.raises(Unavailable, match="no network"):
            await journal.verified_snapshot(snapshot)
        with pytest.raises(Unavailable, match="no network"):
            await journal.request(operation)
        await journal.drop_staging(await journal.stage_snapshot(MODEL, 2))
        assert operation.payload is not None and operation.result is not None
        journal.store.packs.remove([operation.payload.pack])
    assert operation.payload.pack in there.names("packs")
    journal.store.packs.remove([operation.result.pack])
    assert not {operation.payload.pack, operation.result.pack} & set(there.names("packs"))
    await journal.verified_snapshot(snapshot)
    await journal.close()


async def test_snapshots_of_two_controllers_at_one_number_are_apart(mirrored: JournalConfig):
    journal, _ = await opened(mirrored)
    first, second = [await journal.stage_snapshot(MODEL, 1) for _ in range(2)]
    for folder in (first, second):
        (folder / "rank0.bin").write_bytes(folder.name.encode())
    kept = await journal.seal_snapshot(second, MODEL, 1, 0)
    await journal.drop_staging(first)
    assert (await journal.verified_snapshot(kept) / "rank0.bin").read_text() == second.name
    await journal.close()


class SlowObjects(Objects):
    """Counts its calls, and waits in each that lists or removes."""

    calls = 0

    def remove_files(self, names: Iterable[str]) -> None:
        self._wait()
        super().remove_files(names)

    def names(self, folder: str) -> list[str]:
        self._wait()
        return super().names(folder)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._wait()
            super().remove([name])

    def _wait(self) -> None:
        self.calls += 1
        time.sleep(0.05)


async def test_a_sweep_asks_the_mirror_a_few_times(mirrored: JournalConfig):
    config = mirrored.model_copy(update={"retention_s": 0.001})
    journal, _ = await opened(config)
    await journal.write(SessionOpened("s", {}, time.time()))
    for number in range(1, 41):
        await journal.write(*done(number, sample(number), time.time() - 100))
    assert config.mirror is not None
    slow = SlowObjects(config.mirror)
    journal._packs.mirror = slow
    packs = len(slow.names("packs"))
    assert packs >= 40
    slow.calls = 0
    await journal.sweep()
    assert not slow.names("packs") and not list((journal.folder / "packs").iterdir())
    assert slow.calls < 8
    await journal.close()


async def test_packs_that_are_gone_are_no_error(mirrored: JournalConfig):
    assert mirrored.mirror is not None
    objects = Objects(mirrored.mirror)
    for name in ("a", "c"):
        objects.put(f"packs/{name}", b"x")
    objects.remove_files([f"packs/{name}" for name in "abc"])
    assert objects.names("packs") == []
    objects.remove_files(["packs/a"])


async def test_slow_uploads_of_snapshots_do_not_delay_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal, _ = await opened(JournalConfig(folder=tmp_path / "journal"))
    may_end = threading.Event()
    monkeypatch.setattr(journal._folders, "seal", lambda *_: may_end.wait(30))
    monkeypatch.setattr(journal, "write", AsyncMock())
    threads = min(32, (os.cpu_count() or 1) + 4)  # of the loop's own pool
    seals = [
        asyncio.create_task(journal.seal_snapshot(tmp_path / str(n), MODEL, n, 0))
        for n in range(threads)
    ]
    try:
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(journal.find("r1"), 5) is None
    finally:
        may_end.set()
        await asyncio.gather(*seals)
        await journal.close()
