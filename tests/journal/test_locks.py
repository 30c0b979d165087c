"""One process at a time has a journal; the next takes it over without a loss."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.verbs import KINDS
from skyrl_actors.journal.journal import SqlJournal
from skyrl_actors.journal.locks import SILENCE_S
from skyrl_actors.messages.errors import ConfigError
from tests.journal.test_journal import accepted

HOLDER = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    from skyrl_actors.config.cluster import JournalConfig
    from skyrl_actors.controller.verbs import KINDS
    from skyrl_actors.journal.journal import SqlJournal
    from skyrl_actors.journal.store import LAST_COMMIT
    from tests.journal.test_journal import accepted

    async def hold():
        journal = SqlJournal(JournalConfig.model_validate_json(sys.argv[1]), KINDS)
        await journal.open("the first")
        await journal.write(accepted(1))
        print("open", flush=True)
        if len(sys.argv) > 2:  # leave a transaction open
            transaction = journal.store.engine.connect()
            transaction.execute(LAST_COMMIT)
        while journal.deposed is None:
            await asyncio.sleep(0.02)
        try:
            await journal.write(accepted(2))
        except Exception as error:
            print(type(error).__name__, flush=True)

    asyncio.run(hold())
""")


@pytest.fixture
def holder(config: JournalConfig, request: pytest.FixtureRequest):
    """A process that has the journal open, with one accepted operation."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, config.model_dump_json(), *getattr(request, "param", ())],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


async def test_the_next_process_waits_and_then_has_all_operations(
    config: JournalConfig, holder: subprocess.Popen[str]
):
    journal = SqlJournal(config, KINDS)
    opening = asyncio.create_task(journal.open("the second", wait=True))
    await asyncio.sleep(1.0)
    assert not opening.done()
    holder.kill()
    killed = time.monotonic()
    journal_state = await opening
    assert time.monotonic() - killed < SILENCE_S, "it waited for the silence of a dead process"
    assert [operation.number for operation in journal_state.operations] == [1]
    await journal.close()


@pytest.mark.parametrize("holder", [(), ("in a transaction",)], indirect=True)
@pytest.mark.parametrize("config", ["postgres"], indirect=True)
async def test_a_process_that_stands_still_loses_its_turn_and_cannot_write(
    config: JournalConfig, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
):
    journal = SqlJournal(config, KINDS)
    opening = asyncio.create_task(journal.open("the second", wait=True))
    await asyncio.sleep(0.5)
    os.kill(holder.pid, signal.SIGSTOP)
    await asyncio.wait_for(opening, SILENCE_S + 60)  # on a busy machine
    assert "the journal's holder is silent" in caplog.text  # not a timeout of the database
    await journal.write(accepted(2))
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.stdout is not None
    assert await asyncio.to_thread(holder.stdout.readline) == "Unavailable\n"
    assert journal.deposed is None
    await journal.close()


@pytest.mark.parametrize("config", ["postgres"], indirect=True)
async def test_a_holder_takes_its_lock_again_when_the_database_ended_all_sessions(
    config: JournalConfig,
):
    first, second = SqlJournal(config, KINDS), SqlJournal(config, KINDS)
    await first.open("the first")
    opening = asyncio.create_task(second.open("the second", wait=True))
    await asyncio.sleep(0.3)
    with first.store.engine.connect() as connection:
        connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    await asyncio.sleep(SILENCE_S + 1)
    assert first.deposed is None and not opening.done()
    await first.write(accepted(1))
    await first.close()
    assert [op.number for op in (await opening).operations] == [1]
    await second.close()


@pytest.mark.parametrize("config", ["postgres"], indirect=True)
async def test_an_unrelated_service_never_ends_the_session_of_a_silent_one(
    config: JournalConfig, holder: subprocess.Popen[str]
):
    os.kill(holder.pid, signal.SIGSTOP)
    await asyncio.sleep(SILENCE_S)
    with pytest.raises(ConfigError, match="in use by the first; stop it first"):
        await SqlJournal(config, KINDS).open("another service")


@pytest.mark.parametrize("config", ["postgres"], indirect=True)
async def test_a_holder_is_not_deposed_by_its_own_session_that_the_server_still_has(
    config: JournalConfig,
):
    first, second = SqlJournal(config, KINDS), SqlJournal(config, KINDS)
    await first.open("the first")
    lock = first._database_lock
    assert lock is not None
    lost, lock._connection = lock._connection, None
    await asyncio.sleep(SILENCE_S)
    assert first.deposed is None
    await first.write(accepted(1))
    opening = asyncio.create_task(second.open("the second", wait=True))
    await asyncio.sleep(SILENCE_S + 0.5)
    assert not opening.done(), "the lock was not taken again"
    await first.close()
    await opening
    await second.close()
    assert lost is not None
    lost.invalidate()
    lost.close()
