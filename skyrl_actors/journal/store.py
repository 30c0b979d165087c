"""Write and read the journal's rows and packs synchronously, from one thread.

One `write` is one pack and one transaction.
"""

import logging
import os
import threading
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential,
)

from skyrl_actors.journal import stored_images
from skyrl_actors.journal import tables as t
from skyrl_actors.journal.encoding import UNENCODABLE, encode
from skyrl_actors.journal.entries import Entry, JournalState, Operation, SnapshotTaken
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.journal.loading import (
    drop_unanswered,
    load,
    newest_answered,
    retired_weights,
)
from skyrl_actors.journal.packs import Pack, PackStore
from skyrl_actors.journal.redo import Commit, CommitsLost, RedoLog, Statement
from skyrl_actors.journal.rows import operation_of, record_of, statements
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.weights import SamplerWeights

log = logging.getLogger(__name__)
# Locked: a running commit holds this row, so its outcome is known only when the row is free.
LAST_COMMIT = sa.select(t.info.c.value).where(t.info.c.key == "commit").with_for_update()
LAST_EPOCH = sa.select(t.info.c.value).where(t.info.c.key == "epoch")
# A commit may wait for a standby without limit: cancelled, it would be confirmed without it.
NO_TIMEOUT = sa.text("SET LOCAL statement_timeout = 0")
FENCE = (
    sa.update(t.info)
    .where(t.info.c.key == "commit", t.info.c.value == sa.bindparam("last"))
    .values(value=sa.bindparam("next"))
)

COUNT = sa.text(
    "INSERT INTO packs (name, records) VALUES (:name, :records) "
    "ON CONFLICT (name) DO UPDATE SET records = packs.records + :records"
)


class Fenced(InternalError):
    """Another process has opened the journal since, so this one must not write any more."""


class Store:
    """The journal's database and packs, used from one thread."""

    def __init__(self, engine: sa.Engine, packs: PackStore):
        self.engine = engine
        self.packs = packs
        self.epoch = 0
        self.fenced: str | None = None  # why this process must not write any more
        self.lost: str | None = None  # why the journal must be opened again
        self.waiting: str | None = None  # the fault that hides whether a commit succeeded
        self.unsure = False  # whether the last commit succeeded is not known
        self.closing = threading.Event()
        self._token = ""
        self._redo = RedoLog()
        self._remote = engine.dialect.name == "postgresql"
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="journal-pack")
        name = engine.url.database
        self._file = Path(name) if engine.dialect.name == "sqlite" and name else None
        self._inode: int | None = None
        self._suspects: set[str] | None = None

    def begin_epoch(self, holder: str, kinds: Kinds, at_least: int = 0) -> JournalState:
        """Fence off earlier writers and read the journal's state.

        `at_least`: an epoch that is known to have begun.
        """
        if self._file is not None:
            self._inode = self._file.stat().st_ino
        with self.engine.begin() as connection:
            key = t.info.c.key
            found = connection.execute(
                sa.select(t.info.c.value).where(key == "epoch").with_for_update()
            ).scalar_one()
            if int(found) < at_least:
                log.error(
                    "the journal's database is an older copy: it was opened %s times and its "
                    "folder %d times; requests accepted and answered since then are lost",
                    found,
                    at_least,
                )
            self.epoch = max(int(found), at_least) + 1
            connection.execute(
                sa.update(t.info).where(key == "epoch").values(value=str(self.epoch))
            )
            self._token = f"{self.epoch}.0"
            self._redo = RedoLog()
            for name, value in (("holder", holder), ("commit", self._token)):
                connection.execute(sa.delete(t.info).where(key == name))
                connection.execute(sa.insert(t.info).values(key=name, value=value))
            drop_unanswered(connection)
            return load(connection, kinds, self.epoch)

    def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries, or none.

        Rows are prepared while records are written to disk. They are committed after the records,
        so that a row never refers to a missing record. A transaction begins only when a remote copy
        of the records is complete, which may take longer than a database keeps an idle one. Images
        have packs of their own: they are kept as long as any request has them.
        """
        self._check_file()
        users, new = stored_images.of_requests(self.engine, self.packs, entries)
        pack, images = Pack(_encoded(entries)), Pack(new)
        packs = [each for each in (pack, images) if each.records]
        packing = [self._packer.submit(self.packs.write, each) for each in packs]
        try:
            todo = statements(entries, pack.blobs())
            todo += stored_images.use(list(images.blobs()), users)
            todo += [(COUNT, {"name": each.name, "records": len(each.records)}) for each in packs]
            self._commit(todo, packing)
        except BaseException:
            if self._suspects is not None:
                self._suspects |= {each.name for each in packs}
            raise
        finally:
            wait(packing)
        self._check_file()

    def _commit(self, todo: list[Statement], packing: Sequence["Future[None]"]) -> None:
        epoch, _, count = self._token.partition(".")
        token = f"{epoch}.{int(count) + 1}"
        if self.packs.mirror is not None:
            _finish(packing)
        try:
            with self.engine.begin() as connection:
                if connection.execute(FENCE, {"last": self._token, "next": token}).rowcount != 1:
                    self._redo_lost(connection)
                    connection.execute(FENCE, {"last": self._token, "next": token})
                try:
                    _execute(connection, todo)
                except (DataError, OverflowError) as error:  # sqlite3 raises the second as it is
                    raise InvalidRequest(f"a value cannot be stored: {error!a}") from None
                if self._remote:
                    connection.execute(NO_TIMEOUT)
                _finish(packing)
        except DBAPIError as error:
            if not error.connection_invalidated or not self._reached(token, error):
                raise
        if self._remote:  # an open SQLite file cannot go back
            self._redo.add(Commit(self._token, token, todo))
        self._token = token

    def _redo_lost(self, connection: sa.Connection) -> None:
        """Handle a database whose last commit is not this store's.

        Either a later service made it, or the database lost the last commits. Lost commits are
        repeated in this transaction. Raises Fenced or CommitsLost.
        """
        epoch, found = (
            connection.execute(LAST_EPOCH).scalar_one(),
            connection.execute(LAST_COMMIT).scalar_one(),
        )
        self._check_epoch(int(epoch))
        missing = self._redo.since(found)
        if missing is None or int(epoch) < self.epoch:
            last = connection.execute(sa.select(sa.func.max(t.operations.c.number))).scalar() or 0
            self.lost = (
                f"the journal's database went back to commit {found} "
                f"(this service confirmed {self._token}): it was restored, "
                "or failed over to a copy without the newest commits; "
                f"requests above number {last} are lost, and the journal is opened again"
            )
            raise CommitsLost(self.lost)
        for commit in missing:
            _execute(connection, commit.statements)
        connection.execute(FENCE, {"last": found, "next": self._token})
        log.error(
            "the journal's database had lost its last %d commits, as after a failover; "
            "they were repeated",
            len(missing),
        )

    def _check_epoch(self, epoch: int) -> None:
        """Raise Fenced if a later service has opened the journal."""
        if epoch > self.epoch:
            self.fenced = (
                "another service has opened this journal since; this one must not write any more"
            )
            raise Fenced(self.fenced)

    @contextmanager
    def removing(self) -> Generator[sa.Connection]:
        """Begin a transaction that removes rows. Raises Fenced after another service has begun.

        No other service begins before the end of the transaction.
        """
        with self.engine.begin() as connection:
            self._check_epoch(int(connection.execute(LAST_EPOCH.with_for_update()).scalar_one()))
            yield connection

    def close(self) -> None:
        self._packer.shutdown(wait=True)
        self.engine.dispose()

    def _reached(self, token: str, error: DBAPIError) -> bool:
        """Return whether the database has a commit whose answer was lost with the connection.

        The writes of this commit are not refused before this is known, because a repeat would then
        be applied twice. Raises Fenced if a later service hides it.
        """
        self.waiting, self.unsure = str(error.orig), True
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(DBAPIError),
                wait=wait_exponential(0.05, max=2),
                stop=stop_when_event_set(self.closing),
                sleep=sleep_using_event(self.closing),
                reraise=True,
            ):
                with attempt, self.engine.connect() as connection:
                    found = str(connection.execute(LAST_COMMIT).scalar())
                    self._check_epoch(int(found.partition(".")[0]))
                    self.unsure = False
                    return found == token
        finally:
            self.waiting = None
        return False

    def _check_file(self) -> None:
        """Check that the file exists: SQLite writes to a deleted one without an error."""
        if self._file is None:
            return
        try:
            inode = os.stat(self._file).st_ino
        except FileNotFoundError:
            inode = None
        if inode != self._inode:
            self.engine.dispose()
            raise OSError(f"the journal's database {self._file} was removed or replaced")

    def find(self, request_id: str) -> Operation | None:
        with self.engine.connect() as connection:
            row = connection.execute(
                sa.select(t.operations).where(t.operations.c.request_id == request_id)
            ).first()
        return operation_of(row) if row else None

    def operations(self, model_id: str, after: int, upto: int) -> list[Operation]:
        column = t.operations.c
        query = sa.select(t.operations).where(
            column.model_id == model_id, column.number > after, column.number <= upto
        )
        with self.engine.connect() as connection:
            return [operation_of(row) for row in connection.execute(query.order_by(column.number))]

    def trimmed(self, model_id: str) -> int:
        """Return the number up to which a model's operations may be removed, or 0."""
        query = sa.select(t.trimmed.c.number).where(t.trimmed.c.model_id == model_id)
        with self.engine.connect() as connection:
            return connection.execute(query).scalar() or 0

    def snapshots(self, model_id: str) -> list[SnapshotTaken]:
        query = (
            sa.select(t.snapshots)
            .where(t.snapshots.c.model_id == model_id)
            .order_by(t.snapshots.c.number.desc())
        )
        with self.engine.connect() as connection:
            return [SnapshotTaken(**row) for row in connection.execute(query).mappings()]

    def snapshot_folders(self) -> set[str]:
        with self.engine.connect() as connection:
            return set(connection.execute(sa.select(t.snapshots.c.folder)).scalars())

    def of_kinds(self, model_id: str, numbers: Sequence[int], kinds: Collection[str]) -> set[int]:
        """Return which of these operations are of these kinds."""
        column = t.operations.c
        where = (
            column.model_id == model_id,
            column.number.in_(list(numbers)),
            column.kind.in_(kinds),
        )
        with self.engine.connect() as connection:
            return set(connection.execute(sa.select(column.number).where(*where)).scalars())

    def newest_answered(self, stream: str, before: int, limit: int) -> list[Operation]:
        with self.engine.connect() as connection:
            return newest_answered(connection, stream, before, limit)

    def mark_last_number(self) -> None:
        """Store the last number before rows are removed, so that it is not used again."""
        self.write([])
        with self.removing() as connection:
            last = connection.execute(sa.select(sa.func.max(t.operations.c.number))).scalar() or 0
            known = connection.execute(
                sa.select(t.info.c.value).where(t.info.c.key == t.LAST_NUMBER)
            ).scalar()
            connection.execute(sa.delete(t.info).where(t.info.c.key == t.LAST_NUMBER))
            value = str(max(last, int(known or 0)))
            connection.execute(sa.insert(t.info).values(key=t.LAST_NUMBER, value=value))

    def take_suspects(self) -> list[str]:
        """Return packs that may be in no row.

        The first call returns all packs, later calls those of writes that failed since.
        """
        found, self._suspects = self._suspects, set()
        return self.packs.names() if found is None else sorted(found)

    def retired_weights(self) -> list[SamplerWeights]:
        """Return the weights of retired samplers, until a sweep removes their rows."""
        with self.engine.connect() as connection:
            return retired_weights(connection)

    def oldest_sampler(self, model_id: str) -> int | None:
        """Return the operation that saved a model's oldest unnamed version with an open sampler."""
        column = t.samplers.c
        query = sa.select(sa.func.min(column.number)).where(
            column.owner == model_id, ~column.retired
        )
        with self.engine.connect() as connection:
            return connection.execute(query).scalar()


def _finish(packing: Sequence["Future[None]"]) -> None:
    for each in packing:
        each.result()


def _execute(connection: sa.Connection, todo: Sequence[Statement]) -> None:
    for statement, parameters in todo:
        connection.execute(statement, parameters)


def _encoded(entries: Sequence[Entry]) -> list[bytes]:
    try:
        return [encode(record) for entry in entries if (record := record_of(entry)) is not None]
    except UNENCODABLE as error:
        raise InvalidRequest(f"a value cannot be stored: {error!a}") from None
