"""A database whose host vanishes, and one that lost its last commits in a failover."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal import group_commit, redo, watchdog
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.opening import EPOCH, database_url
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.messages.results import StepDone
from tests.journal.proxy import Proxy
from tests.journal.test_journal import accepted, answered

pytestmark = pytest.mark.parametrize("config", ["postgres"], indirect=True)


@pytest.fixture
def proxy(config: JournalConfig) -> Iterator[Proxy]:
    folder = make_url(str(config.url)).query["host"]
    made = Proxy(Path(str(folder)) / ".s.PGSQL.5432")
    yield made
    made.close()


def through(proxy: Proxy, config: JournalConfig) -> JournalConfig:
    database = make_url(str(config.url)).database
    return config.model_copy(
        update={"url": f"postgresql://postgres:@127.0.0.1:{proxy.port}/{database}"}
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  plain attributes
            await asyncio.sleep(0.02)


async def test_a_vanished_host_is_reported_and_its_successor_is_used(
    config: JournalConfig, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group_commit, "SLOW_S", 0.5)
    monkeypatch.setattr(watchdog, "LONGEST_CALL_S", 2.0)
    journal = SqlJournal(through(proxy, config), KINDS)
    await journal.open("x")
    await journal.write(accepted(1))
    proxy.silence()
    began = time.monotonic()
    writing = asyncio.create_task(journal.write(accepted(2)))
    await until(lambda: journal.trouble)
    assert "a write has taken" in str(journal.trouble) and not writing.done()
    results = await asyncio.wait_for(asyncio.gather(writing, return_exceptions=True), 30)
    assert time.monotonic() - began >= 2.0
    if isinstance(results[0], Unavailable):  # the write did not reach the database
        await journal.write(accepted(2))
    await until(lambda: journal.trouble is None)
    found = await journal.operations("s:train:0", 0, 9)
    assert [op.number for op in found] == [1, 2]
    await journal.close()


async def test_a_read_from_a_vanished_host_ends(
    config: JournalConfig, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "LONGEST_CALL_S", 1.0)
    journal = SqlJournal(through(proxy, config), KINDS)
    await journal.open("x")
    await journal.write(accepted(1))
    assert await journal.find("r1") is not None
    proxy.silence()
    async with asyncio.timeout(30):
        while True:
            try:
                found = await journal.find("r1")
                break
            except Unavailable:
                continue
    assert found is not None
    await journal.close()


async def test_connections_have_timeouts_on_both_ends(config: JournalConfig, proxy: Proxy):
    journal = SqlJournal(through(proxy, config), KINDS)
    await journal.open("x")
    with journal.store.engine.connect() as connection:
        shown = {
            name: connection.execute(sa.text(f"SHOW {name}")).scalar()
            for name in ("statement_timeout", "idle_in_transaction_session_timeout")
        }
        driver = connection.connection.dbapi_connection
        assert driver is not None
        parameters = driver.info.get_parameters()  # type: ignore[attr-defined]
    assert shown == {"statement_timeout": "15s", "idle_in_transaction_session_timeout": "30s"}
    assert parameters["keepalives_idle"] == "5" and parameters["tcp_user_timeout"] == "10000"
    await journal.close()


def fail_over(config: JournalConfig, commit: str, upto: int, epoch: int | None = None) -> None:
    """Turn the database into a copy without the commits after `commit`."""
    engine = sa.create_engine(database_url(config.folder, config.url))
    with engine.begin() as connection:
        connection.execute(sa.text(f"DELETE FROM operations WHERE number > {upto}"))
        connection.execute(sa.text("UPDATE operations SET answered_at = NULL, result_pack = NULL"))
        connection.execute(
            sa.text(f"UPDATE journal_info SET value = '{commit}' WHERE key = 'commit'")
        )
        connection.execute(
            sa.text("DELETE FROM packs WHERE name NOT IN (SELECT payload_pack FROM operations)")
        )
        connection.execute(sa.text("UPDATE packs SET records = 1"))
        if epoch is not None:
            connection.execute(
                sa.text(f"UPDATE journal_info SET value = '{epoch}' WHERE key = 'epoch'")
            )
    engine.dispose()


async def test_commits_lost_in_a_failover_are_repeated(config: JournalConfig):
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    await journal.write(accepted(1))  # commit 1.1
    await journal.write(accepted(2))
    await journal.write(answered(1))
    fail_over(config, "1.1", 1)
    await journal.write(accepted(3))
    assert journal.trouble is None and journal.lost is None
    found = await journal.operations("s:train:0", 0, 9)
    assert [(op.number, op.answered_at is not None) for op in found] == [
        (1, True),
        (2, False),
        (3, False),
    ]
    assert await journal.result(found[0]) == StepDone({"norm": 1.0})
    await journal.sweep()
    for operation in found:
        await journal.request(operation)
    await journal.close()


async def test_a_sweep_after_a_failover_keeps_packs_of_lost_rows(
    config: JournalConfig,
):
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    await journal.write(accepted(1))
    await journal.write(accepted(2))
    fail_over(config, "1.1", 1)
    await journal.sweep()
    for operation in await journal.operations("s:train:0", 0, 9):
        await journal.request(operation)
    assert len(await journal.operations("s:train:0", 0, 9)) == 2
    await journal.close()


@pytest.mark.parametrize("epoch", [None, 0])
async def test_a_database_that_lost_too_much_is_reported_and_opened_again(
    config: JournalConfig, monkeypatch: pytest.MonkeyPatch, epoch: int | None
):
    monkeypatch.setattr(redo, "KEPT_ROWS", 1 if epoch is None else 20_000)
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    for number in range(1, 6):
        await journal.write(accepted(number))
    fail_over(config, "1.2" if epoch is None else "0.0", 2, epoch)
    with pytest.raises(
        Unavailable,
        match="requests above number 2 are lost, and the journal is opened again",
    ):
        await journal.write(accepted(6))
    assert journal.lost is not None and "another service" not in journal.lost
    await journal.close()
    journal = SqlJournal(config, KINDS)
    journal_state = await journal.open("x")
    assert journal_state.epoch == 2, (
        "ranks have seen epoch 1, and refuse calls of that epoch or an earlier one"
    )
    assert (config.folder / EPOCH).read_text() == "2"
    await journal.write(accepted(3))
    assert [op.number for op in await journal.operations("s:train:0", 0, 9)] == [1, 2, 3]
    await journal.close()


async def test_the_outcome_of_a_running_commit_is_awaited(config: JournalConfig):
    """The connection is lost while the server commits: the outcome is queried, not guessed."""
    journal = SqlJournal(config, KINDS)
    await journal.open("x")
    await journal.write(accepted(1))
    store = journal.store
    other = sa.create_engine(database_url(config.folder, config.url))
    with other.connect() as held:
        held.execute(sa.text("UPDATE journal_info SET value = '1.2' WHERE key = 'commit'"))
        fault: Any = sa.exc.DBAPIError("commit", None, Exception("lost"))  # type: ignore[arg-type]
        asking = asyncio.create_task(asyncio.to_thread(store._reached, "1.2", fault))
        await asyncio.sleep(0.3)
        assert not asking.done()
        held.commit()
        assert await asyncio.wait_for(asking, 10) is True
    other.dispose()
    with store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE journal_info SET value = '1.1' WHERE key = 'commit'"))
    await journal.close()
