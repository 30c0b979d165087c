"""Copy a journal's database while a service writes it, and check a journal.

A copy is always an SQLite database, so that a backup can be restored to either kind of database.
"""

import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.journal import opening
from skyrl_actors.journal import tables as t
from skyrl_actors.journal.entries import Blob, SnapshotTaken
from skyrl_actors.journal.group_commit import reason
from skyrl_actors.journal.packs import PACKS, PackStore
from skyrl_actors.journal.snapshots import MANIFEST, SNAPSHOTS, SnapshotFolders
from skyrl_actors.messages.errors import ConfigError, Corrupt
from skyrl_actors.storage.files import write_durably
from skyrl_actors.storage.objects import Objects

ROWS = 1000  # copied at a time
HELD_S = 600.0


@contextmanager
def held(folder: Path) -> Generator[None]:
    """Stop the sweeps of a journal: nothing that a row names is removed meanwhile.

    Each holder has a note of its own in the journal's folder. A note ends by itself after `HELD_S`,
    in case its process dies; a thread renews it until then.
    """
    note, ended = folder / f"{opening.HOLD}.{uuid.uuid4().hex}", threading.Event()

    def renew() -> None:
        while not ended.wait(HELD_S / 10):
            write_durably(note, str(time.time() + HELD_S))

    write_durably(note, str(time.time() + HELD_S))
    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        note.unlink(missing_ok=True)


def copy_rows(source: sa.Engine, target: sa.Engine, progress: Callable[[int], None]) -> int:
    """Copy all rows as they are at one time into an empty database, and return their number.

    Raises ConfigError if the versions differ. `progress` is called with the rows so far.
    """
    with source.connect() as reading, target.begin() as writing:
        opening.create(writing)
        _begin_reading(reading)
        _check_version(reading)
        copied = 0
        for table in t.metadata.sorted_tables:
            writing.execute(sa.delete(table))
            rows = reading.execution_options(yield_per=ROWS).execute(sa.select(table))
            for part in rows.mappings().partitions(ROWS):
                writing.execute(sa.insert(table), [dict(row) for row in part])
                copied += len(part)
                progress(copied)
        _set_sequences(writing)
        return copied


def _begin_reading(connection: sa.Connection) -> None:
    """Let all queries of this connection see the same state."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")
    else:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        # Files are read between two rows.
        connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")


def check_version(engine: sa.Engine) -> None:
    """Raise ConfigError for a journal of another version than this program's."""
    with engine.connect() as connection:
        _check_version(connection)


def check_not_newer(engine: sa.Engine) -> None:
    """Raise ConfigError for a journal that this program could not bring up to date."""
    with engine.connect() as connection:
        opening.check_version(connection)


def _check_version(connection: sa.Connection) -> None:
    query = sa.text(f"SELECT version_num FROM {opening.VERSION_TABLE}")
    theirs, ours = connection.execute(query).scalar(), opening.current_version()
    if theirs != ours:
        raise ConfigError(
            f"the journal has version {theirs} and this program {ours}; serve it once with this "
            "program, or use the program that wrote it"
        )


def emptied(engine: sa.Engine) -> None:
    """Remove the tables that `copy_rows` has made."""
    with engine.begin() as connection:
        t.metadata.drop_all(connection)
        connection.execute(sa.text(f"DROP TABLE IF EXISTS {opening.VERSION_TABLE}"))


def _set_sequences(connection: sa.Connection) -> None:
    """Let numbers that PostgreSQL gives continue after the copied ones."""
    if connection.dialect.name == "postgresql":
        connection.execute(
            sa.text(
                "SELECT setval(pg_get_serial_sequence('audit', 'number'), "
                "(SELECT COALESCE(MAX(number), 0) + 1 FROM audit), false)"
            )
        )


def value_of(engine: sa.Engine, key: str) -> str | None:
    """Return a value of the journal's table of facts, such as `journal_id` or `epoch`."""
    with engine.connect() as connection:
        return connection.execute(sa.select(t.info.c.value).where(t.info.c.key == key)).scalar()


def named_files(engine: sa.Engine) -> tuple[list[str], list[str]]:
    """Return the names of the packs and of the snapshot folders that rows refer to."""
    with engine.connect() as connection:
        packs = connection.execute(sa.select(t.packs.c.name)).scalars().all()
        folders = connection.execute(sa.select(t.snapshots.c.folder)).scalars().all()
    return sorted(packs), sorted(set(folders))


def fetch_missing(
    folder: Path, mirror: Objects, packs: Sequence[str], snapshots: Sequence[str]
) -> None:
    """Fetch files of a journal that its folder lost. Raises ConfigError."""
    try:
        _fetch_missing(folder, mirror, packs, snapshots)
    except OSError as error:
        raise ConfigError(f"files of the journal cannot be fetched: {error}") from None


def _fetch_missing(
    folder: Path, mirror: Objects, packs: Sequence[str], snapshots: Sequence[str]
) -> None:
    store = PackStore(folder / PACKS, mirror)
    folders = SnapshotFolders(folder / SNAPSHOTS, mirror=mirror)
    for pack in packs:
        if not (store.folder / pack).exists():
            store.fetch(pack)
    for snapshot in snapshots:
        if not (folders.root / snapshot / MANIFEST).exists():
            folders.fetch(snapshot)


def faults(
    engine: sa.Engine,
    folder: Path,
    progress: Callable[[int], None],
    mirror: Objects | None = None,
) -> Iterator[str]:
    """Check every record, image and snapshot that rows refer to, and yield what is wrong.

    `progress` is called with the number of checked records. With a mirror, missing and damaged
    files are fetched from it, and only what is wrong there too is yielded. Raises ConfigError for a
    journal of another version.
    """
    try:
        yield from _faults(engine, folder, progress, mirror)
    except SQLAlchemyError as error:
        yield f"the database cannot be read: {reason(error)}"


def _faults(
    engine: sa.Engine, folder: Path, progress: Callable[[int], None], mirror: Objects | None
) -> Iterator[str]:
    packs, checked = PackStore(folder / PACKS, mirror), 0
    with engine.connect() as connection:
        _begin_reading(connection)
        if connection.dialect.name == "sqlite":
            found = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
            if found != "ok":
                yield f"the database is damaged: {found}"
        _check_version(connection)
        for what, blob in _blobs(connection):
            try:
                packs.read(blob)
            except (Corrupt, OSError) as error:
                yield f"{what}: {error}"
            checked += 1
            progress(checked)
        snapshots = SnapshotFolders(folder / SNAPSHOTS, mirror=mirror)
        for row in connection.execute(sa.select(t.snapshots)).mappings().all():
            try:
                snapshots.verify(SnapshotTaken(**row))
            except (Corrupt, OSError) as error:
                yield str(error)


def _blobs(connection: sa.Connection) -> Iterator[tuple[str, Blob]]:
    """Yield every record with a description, in the order of packs."""
    column: Any = t.operations.c
    streaming = connection.execution_options(yield_per=ROWS)
    for name in ("payload", "result"):
        pack = column[f"{name}_pack"]
        query = sa.select(
            column.number,
            pack,
            column[f"{name}_offset"],
            column[f"{name}_length"],
            column[f"{name}_digest"],
        ).where(pack.is_not(None))
        for number, *place in streaming.execute(query.order_by(pack)):
            yield f"the {name} of operation {number}", _blob(place)
    images = t.images.c
    query = sa.select(images.pack, images.start, images.length, images.digest)
    for place in streaming.execute(query):
        yield f"image {place.digest}", _blob(place)


def _blob(place: Any) -> Blob:
    pack, offset, length, digest = place
    return Blob(pack=pack, offset=offset, length=length, digest=digest)


def engine_of(config: JournalConfig) -> tuple[sa.Engine, Path]:
    """Return the database and the folder of a journal's config."""
    folder = config.folder.expanduser().resolve()
    return opening.connect(opening.database_url(folder, config.url)), folder
