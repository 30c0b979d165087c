"""Locks on a journal: one process has it, and others are refused or wait.

With SQLite it is a lock on a file, which the system releases when the process ends. With PostgreSQL
it is an advisory lock of one session, so that it also ends with the machine of the process.

A lock only decides who may begin. Entries of a process that lost it without noticing are refused by
the epoch of the next one (`store.FENCE`).
"""

import fcntl
import logging
import math
import threading
import time
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from skyrl_actors.journal import opening
from skyrl_actors.messages.errors import ConfigError

log = logging.getLogger(__name__)
LOCK_WAIT_S = 3.0  # a killed process may need a moment to end
LOOK_S = 0.05
ADVISORY_LOCK = 0x536B7952
BEAT_S = 0.4
SILENCE_S = 2.0
REFUSALS = 2  # `check` of another service can have the lock for a moment
TRY = sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK))
BEAT = sa.text("SELECT 1")
HOLDER = sa.text("SELECT value FROM journal_info WHERE key = 'holder'")
# The times are the database's own, so that the clocks of the processes do not matter. An open
# transaction of the holder would block the next one, so all its sessions are ended.
END_SILENT = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name IN ("
    "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND classid = 0 AND objid = :lock AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND clock_timestamp() - state_change > make_interval(secs => :silence_s))"
)


# A session of this process can live on in the server after its connection was lost.
END_OWN = sa.text(
    "SELECT pg_terminate_backend(pid, 1000) FROM pg_locks JOIN pg_stat_activity USING (pid) "
    "WHERE locktype = 'advisory' AND granted AND classid = 0 AND objid = :lock AND objsubid = 1 "
    "AND application_name = :name AND pid <> pg_backend_pid()"
)


class FolderLock:
    """A lock on the journal's folder. The system releases it when this process ends."""

    def __init__(self, folder: Path, holder: str, wait_s: float = 0.0):
        self._stream = (folder / opening.LOCK).open("a+")
        if not self._taken(wait_s):
            self._stream.seek(0)
            first = self._stream.read().strip() or "an unknown process"
            self._stream.close()
            raise ConfigError(
                f"the journal {folder} is in use by {first}; stop it first, "
                "or set another journal.folder for this service"
            )
        self._stream.truncate(0)
        self._stream.write(holder)
        self._stream.flush()

    def _taken(self, wait_s: float) -> bool:
        if wait_s == math.inf:  # the system wakes this thread
            fcntl.flock(self._stream, fcntl.LOCK_EX)
            return True
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(LOOK_S)

    def release(self) -> None:
        self._stream.close()


class DatabaseLock:
    """An advisory lock of a PostgreSQL journal, in a session that this object keeps busy.

    A process that waits without limit ends the sessions of one that is silent for `SILENCE_S`: that
    process stands still, or its machine vanished. `name` is that of its sessions.
    """

    def __init__(self, url: URL, name: str):
        self.deposed: str | None = None  # which process has taken the lock over
        self.ended_silent = False  # whether it ended the session of a silent process
        self._name = name
        self._engine = opening.connect(url, name)
        self._connection: sa.Connection | None = None
        self._closing = threading.Event()
        self._confirmed_at = math.inf
        self._beating = threading.Thread(target=self._beat, name="journal-lock", daemon=True)

    def take(self, wait_s: float) -> None:
        """Take the lock. Raises ConfigError if another process still has it after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while (first := self._tried(wait_s == math.inf)) is not None:
            if time.monotonic() >= deadline or self._closing.is_set():
                raise ConfigError(
                    f"the journal {self._engine.url} is in use by {first}; "
                    "stop it first, or set another journal.url"
                )
            self._closing.wait(LOOK_S)
        self._confirmed_at = time.monotonic()
        self._beating.start()

    @property
    def is_silent(self) -> bool:
        """Whether the server has not confirmed the lock for so long that another may have it."""
        return time.monotonic() - self._confirmed_at > SILENCE_S

    def _tried(self, is_patient: bool) -> str | None:
        try:
            first = self._try()
            if first is not None and is_patient:
                self._end_silent_holder()
            return first
        except DBAPIError as error:
            if not is_patient:
                raise
            log.warning("waiting for the journal's database: %s", error.orig)
            self._drop_connection()
            # The process that had the lock before the database failed takes it again.
            self._closing.wait(SILENCE_S)
            return "an unknown process"

    def close(self) -> None:
        """Release the lock."""
        self._closing.set()
        if self._beating.is_alive():
            self._beating.join(BEAT_S)
        self._drop_connection()
        self._engine.dispose()

    def _try(self) -> str | None:
        """Try once. Return None if this session has the lock now, else its holder."""
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(
                isolation_level="AUTOCOMMIT"
            )
        if self._connection.execute(TRY).scalar():
            return None
        return self._connection.execute(HOLDER).scalar() or "an unknown process"

    def _end_silent_holder(self) -> None:
        assert self._connection is not None
        parameters = {"lock": ADVISORY_LOCK, "silence_s": SILENCE_S}
        if self._connection.execute(END_SILENT, parameters).all():
            log.warning("the journal's holder is silent: its sessions are ended")
            self.ended_silent = True

    def _beat(self) -> None:
        """Keep the session busy. Set `deposed` when another process has the lock."""
        refusals, has_it = 0, True
        while not self._closing.wait(BEAT_S) and self.deposed is None:
            try:
                if has_it and self._connection is not None:
                    self._connection.execute(BEAT)
                    self._confirmed_at = time.monotonic()
                    continue
                holder = self._try()
                if holder is not None and self._own_sessions_ended():
                    holder = self._try()
                has_it, refusals = holder is None, refusals + 1
                if not has_it and refusals > REFUSALS:
                    self.deposed = f"the journal was taken over by {holder}"
                    log.error(self.deposed)
            except DBAPIError as error:
                log.warning("the lock on the journal was lost: %s", error.orig)
                self._drop_connection()
                has_it, refusals = False, 0

    def _own_sessions_ended(self) -> bool:
        assert self._connection is not None
        parameters = {"lock": ADVISORY_LOCK, "name": self._name}
        return bool(self._connection.execute(END_OWN, parameters).all())

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.invalidate()
            connection.close()
