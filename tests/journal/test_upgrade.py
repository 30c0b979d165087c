"""Journals of other versions: older ones are migrated, newer ones are refused."""

import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import opening, tables
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.messages.errors import ConfigError


def migrate_to(engine: sa.Engine, revision: str) -> None:
    scripts = opening._scripts()
    with (
        engine.begin() as connection,
        EnvironmentContext(
            Config(), scripts, fn=lambda found, _: scripts._upgrade_revs(revision, found)
        ) as environment,
    ):
        environment.configure(connection=connection, version_table=opening.VERSION_TABLE)
        with environment.begin_transaction():
            environment.run_migrations()


async def test_a_journal_of_the_first_version_is_migrated(config: JournalConfig):
    opening.check_folder(config.folder)
    engine = opening.connect(opening.database_url(config.folder, config.url))
    migrate_to(engine, "0001")
    row = (
        "INSERT INTO operations (number, request_id, kind, stream, digest, model_id, session_id, "
        "accepted_at, answered_at, effect) "
        "VALUES ({0}, 'r{0}', '{1}', 'm', 0, 'm', 's', 1.0, {2}, '{3}')"
    )
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO sessions (session_id, user_metadata, opened_at) "
                "VALUES ('s', '{}', 1.0)"
            )
        )
        for number, kind, at, effect in (
            (1, "CreateModel", "1.0", "applied"),
            (2, "OptimStep", "1.0", "applied"),
            (3, "OptimStep", "1.0", "dropped"),
            (4, "OptimStep", "1.0", "applied"),
            (5, "ForwardBackward", "NULL", "none"),
        ):
            connection.execute(sa.text(row.format(number, kind, at, effect)))
    engine.dispose()
    journal = SqlJournal(config, KINDS)
    journal_state = await journal.open("x")
    assert [op.step for op in await journal.operations("m", 0, 9)] == [0, 1, 1, 2, None]
    assert [op.number for op in journal_state.operations] == [1, 2, 3, 4, 5]
    assert journal_state.next_number == 6
    await journal.close()


async def test_packs_of_an_older_journal_are_removed_with_their_last_row(
    config: JournalConfig,
):
    opening.check_folder(config.folder)
    engine = opening.connect(opening.database_url(config.folder, config.url))
    migrate_to(engine, "0002")
    row = (
        "INSERT INTO operations (number, request_id, kind, stream, digest, session_id, "
        "accepted_at, answered_at, effect, payload_pack, payload_offset, payload_length, "
        "result_pack, result_offset, result_length) VALUES "
        "({0}, 'r{0}', 'Sample', 'm', 0, 's', {1}, {1}, 'none', 'old', 0, 1, '{2}', 0, 1)"
    )
    now = time.time()
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO sessions (session_id, user_metadata, opened_at) "
                "VALUES ('s', '{}', 1.0)"
            )
        )
        for number, at, pack in ((1, 1.0, "old"), (2, 2.0, "mixed"), (3, now, "mixed")):
            connection.execute(sa.text(row.format(number, at, pack)))
    engine.dispose()
    (config.folder / "packs").mkdir()
    for name in ("old", "mixed", "orphan"):
        (config.folder / "packs" / name).write_text("x")
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    with journal.store.engine.connect() as connection:
        found = dict(
            connection.execute(sa.select(tables.packs.c.name, tables.packs.c.records)).all()
        )
    assert found == {"old": 4, "mixed": 2}
    await journal.sweep()
    # The third row refers to both packs.
    assert sorted(file.name for file in (config.folder / "packs").iterdir()) == ["mixed", "old"]
    assert [n for n in (1, 2, 3) if await journal.find(f"r{n}")] == [3]
    await journal.close()


async def test_the_migrations_create_the_tables_of_the_code(config: JournalConfig):
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    found = sa.inspect(journal.store.engine)
    for table in tables.metadata.sorted_tables:
        columns = {column["name"]: column["nullable"] for column in found.get_columns(table.name)}
        assert columns == {column.name: column.nullable for column in table.columns}, table.name
        indexes = {index["name"] for index in found.get_indexes(table.name)}
        assert {index.name for index in table.indexes} <= indexes
    await journal.close()


async def test_a_newer_journal_is_refused(config: JournalConfig):
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    with journal.store.engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {opening.VERSION_TABLE} SET version_num = '0042'"))
    await journal.close()
    with pytest.raises(
        ConfigError,
        match="version 0042, written by a newer skyrl-actors, "
        "and this one supports versions up to 0006",
    ):
        await SqlJournal(config, KINDS).open("x")


def test_the_folder_of_a_journal_is_marked_and_private(tmp_path: Path):
    config = JournalConfig(folder=tmp_path / "journal")
    journal = SqlJournal(config, KINDS)
    journal._open("x")
    assert '"project": "skyrl-actors"' in (config.folder / "journal.json").read_text()
    # Prompts and rewards are private.
    assert config.folder.stat().st_mode & 0o077 == 0
    journal._close()
