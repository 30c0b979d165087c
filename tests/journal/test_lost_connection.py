"""A PostgreSQL server that closes a connection during a commit.

A write with an unknown outcome is neither refused nor applied twice.
"""

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from tests.journal.test_journal import accepted, answered

pytestmark = pytest.mark.parametrize("config", ["postgres"], indirect=True)


def cut_once_when(journal: SqlJournal, moment: str) -> list[str]:
    """Close the connection `before` COMMIT is sent, or `behind` it, before its answer."""
    engine, cuts = journal.store.engine, []
    commit = engine.dialect.do_commit
    killer = engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def do_commit(dbapi_connection: Any) -> None:
        if cuts:
            return commit(dbapi_connection)
        cuts.append(moment)
        if moment == "behind":
            commit(dbapi_connection)
        with killer:
            pid = dbapi_connection.driver_connection.info.backend_pid
            killer.execute(sa.text(f"SELECT pg_terminate_backend({pid})"))
        dbapi_connection.execute("SELECT 1")  # raises the same error as a lost answer

    engine.dialect.do_commit = do_commit  # pyright: ignore
    return cuts


@pytest.mark.parametrize("moment", ["before", "behind"])
async def test_the_outcome_of_a_commit_without_an_answer_is_queried(
    config: JournalConfig, moment: str
):
    journal = SqlJournal(config, KINDS)
    await journal.open("service 'first'")
    await journal.write(accepted(1))
    cuts = cut_once_when(journal, moment)
    results = await asyncio.gather(
        journal.write(accepted(2)), journal.write(answered(1)), return_exceptions=True
    )
    assert results == [None, None] and cuts == [moment] and journal.trouble is None
    await journal.write(accepted(3))
    found = await journal.operations("s:train:0", 0, 9)
    assert [(op.number, op.answered_at is not None) for op in found] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    await journal.close()


async def test_a_commit_waits_while_the_database_is_unreachable_and_the_reason_is_shown(
    config: JournalConfig,
):
    journal = SqlJournal(config, KINDS)
    await journal.open("service 'first'")
    cuts, back = cut_once_when(journal, "behind"), False
    engine = journal.store.engine

    @event.listens_for(engine, "do_connect")
    def refuse(*_: Any) -> None:
        if cuts and not back:
            driver: Any = engine.dialect.loaded_dbapi
            raise driver.OperationalError("connection refused")

    writing = asyncio.create_task(journal.write(accepted(1)))
    async with asyncio.timeout(10):
        while not journal.trouble:  # noqa: ASYNC110  a plain attribute
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert not writing.done()
    back = True
    await asyncio.wait_for(writing, 10)
    assert journal.trouble is None and [
        op.number for op in await journal.operations("s:train:0", 0, 9)
    ] == [1]
    await journal.close()
