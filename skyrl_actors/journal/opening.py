"""Open a journal: check its owner, its user and its version. Every error states what to do."""

import json
import os
import sqlite3
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url

from skyrl_actors import migrations
from skyrl_actors.journal.packs import PACKS
from skyrl_actors.journal.snapshots import SNAPSHOTS
from skyrl_actors.journal.tables import PROJECT, info
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.files import fsync, write_durably

MARKER = "journal.json"
DATABASE = "journal.db"
LOCK = "journal.lock"  # see `locks`
EPOCH = "journal.epoch"
HOLD = "journal.hold"  # of files with the time until which nothing is swept
STATEMENT_MS = 15_000  # longest time the database may take for one statement
OWN = {
    MARKER,
    "journal.partial",
    DATABASE,
    f"{DATABASE}-wal",
    f"{DATABASE}-shm",
    f"{DATABASE}-journal",
    LOCK,
    EPOCH,
    PACKS,
    SNAPSHOTS,
}
VERSION_TABLE = "skyrl_actors_version"


def database_url(folder: Path, url: str | None) -> URL:
    """Return the configured database, or SQLite in the journal's folder.

    A password is where `str` hides it.
    """
    if url is None:
        return URL.create("sqlite", database=str(folder / DATABASE))
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if (user := parsed.query.get("user")) is not None:
        parsed = parsed.set(username=str(user))
    if (password := parsed.query.get("password")) is not None:
        parsed = parsed.set(password=str(password))
    return parsed.difference_update_query(("user", "password"))


def connect(url: URL, name: str | None = None) -> sa.Engine:
    """Create an engine. Commits to SQLite are synced to disk.

    `name` is that of its sessions in PostgreSQL, so that all can be ended together.
    """
    if url.get_backend_name() != "sqlite":
        named = {} if name is None else {"application_name": name}
        return sa.create_engine(url, connect_args=_bounded(url) | named)
    engine = sa.create_engine(url, connect_args={"timeout": 5, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _durable(connection: sqlite3.Connection, _: Any) -> None:
        # FULL: a commit is on disk when it returns, also in WAL mode.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=2000"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def connect_unchanged(database: Path) -> sa.Engine:
    """Create an engine that reads an SQLite file which nobody writes, and never changes it."""
    address = f"{database.resolve().as_uri()}?mode=ro&immutable=1"
    return sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(address, uri=True))


def _bounded(url: URL) -> dict[str, Any]:
    """Detect a dead host within about 10 s, from both ends. Settings in the URL have priority."""
    ours: dict[str, Any] = {
        "connect_timeout": 5,
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    server = {
        "statement_timeout": STATEMENT_MS,
        "idle_in_transaction_session_timeout": 2 * STATEMENT_MS,
        "tcp_keepalives_idle": 5,
        "tcp_keepalives_interval": 2,
        "tcp_keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    options = " ".join(f"-c {name}={value}" for name, value in server.items())
    given = url.query.get("options", "")
    arguments = {name: value for name, value in ours.items() if name not in url.query}
    return arguments | {
        "options": f"{options} {given if isinstance(given, str) else ' '.join(given)}".strip()
    }


def last_epoch(folder: Path) -> int:
    """Return the newest epoch recorded in this folder. A restored database has an older one."""
    try:
        return int((folder / EPOCH).read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise OSError(
            f"{folder / EPOCH} is damaged ({error}); remove it if no process of this service runs"
        ) from None


def note_epoch(folder: Path, epoch: int) -> None:
    """Record an epoch in the folder, so that a restored older database is detected."""
    write_durably(folder / EPOCH, str(epoch))


def is_held(folder: Path, now: float) -> bool:
    """Return whether a backup forbids sweeps of this journal."""
    for note in folder.glob(f"{HOLD}.*"):
        with suppress(FileNotFoundError, ValueError):
            if float(note.read_text()) > now:
                return True
    return False


def check_folder(folder: Path) -> None:
    """Check that the folder is empty, absent or a journal. Raises ConfigError otherwise."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        names = {file.name for file in folder.iterdir()}
        if MARKER not in names and names - OWN:
            odd = ", ".join(sorted(names - OWN)[:3])
            raise ConfigError(
                f"{folder} is no journal of {PROJECT}: it contains {odd}; "
                "set journal.folder to an empty folder"
            )
        if MARKER in names:
            marker = json.loads((folder / MARKER).read_text())
            if marker.get("project") != PROJECT:
                raise ConfigError(
                    f"{folder} is a journal of {marker.get('project')!r}, not of {PROJECT}; "
                    "set another journal.folder"
                )
            for name in (PACKS, SNAPSHOTS):
                if name not in names:
                    raise ConfigError(
                        f"{folder / name} is missing: "
                        "restore it, or set another journal.folder to start an empty journal"
                    )
        probe = folder / LOCK
        probe.touch(mode=0o600)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no right to read and write {folder}")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the journal's folder {folder} cannot be used: {error}") from None


def migrate(engine: sa.Engine, folder: Path, has_marker: bool, only_check: bool = False) -> str:
    """Migrate the tables to this version and return the journal's id.

    `only_check` changes nothing and returns "".
    """
    with engine.begin() as connection:
        names = set(sa.inspect(connection).get_table_names())
        ours = {VERSION_TABLE, "journal_info"}
        if names and not ours <= names:
            raise ConfigError(
                f"{engine.url} has tables of another program ({min(names)}); "
                "give the journal its own database"
            )
        if not names and has_marker:
            raise ConfigError(
                f"{engine.url} is empty, but {folder} is a journal: "
                "restore its database, or set another journal.folder to start an empty journal"
            )
        _check_version(connection, names)
        if only_check:
            return ""
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SET LOCAL lock_timeout = '10s'"))
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        _run_migrations(connection)
    with engine.begin() as connection:
        return _identity(connection, folder)


def check_empty(connection: sa.Connection) -> None:
    """Raise ConfigError for a database with tables."""
    if names := sa.inspect(connection).get_table_names():
        raise ConfigError(f"{connection.engine.url} is not empty: it has the table {min(names)}")


def create(connection: sa.Connection) -> None:
    """Create the tables of this version in an empty database. Raises ConfigError otherwise."""
    check_empty(connection)
    _run_migrations(connection)


def _scripts() -> ScriptDirectory:
    folder = str(Path(migrations.__file__).parent)
    return ScriptDirectory(folder, version_locations=[folder])


def current_version() -> str:
    """Return the version of the journals that this program writes."""
    return _scripts().get_current_head() or ""


def _check_version(connection: sa.Connection, names: set[str]) -> None:
    if VERSION_TABLE in names:
        check_version(connection)


def check_version(connection: sa.Connection) -> None:
    """Raise ConfigError for a journal of a newer version."""
    found = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    scripts = _scripts()
    try:
        scripts.get_revision(found or "0001")
    except CommandError:
        raise ConfigError(
            f"this journal has version {found}, written by a newer {PROJECT}, "
            f"and this one supports versions up to {scripts.get_current_head()}: "
            "upgrade, or set another journal.folder"
        ) from None


def _run_migrations(connection: sa.Connection) -> None:
    scripts = _scripts()

    def upgrades(found: Any, _: Any) -> Any:
        return scripts._upgrade_revs("head", found)  # pyright: ignore[reportPrivateUsage]

    with EnvironmentContext(Config(), scripts, fn=upgrades) as environment:
        environment.configure(connection=connection, version_table=VERSION_TABLE)
        with environment.begin_transaction():
            environment.run_migrations()


def _identity(connection: sa.Connection, folder: Path) -> str:
    values = {row.key: row.value for row in connection.execute(sa.select(info))}
    marker = folder / MARKER
    here = json.loads(marker.read_text())["journal_id"] if marker.exists() else None
    if values.get("project", PROJECT) != PROJECT:
        raise ConfigError(f"the database is a journal of {values['project']!r}, not of {PROJECT}")
    there = values.get("journal_id")
    if here != there and (here is not None or there is not None):
        raise ConfigError(
            f"{folder} belongs to journal {here} and the database to {there}: "
            "use a folder and a database of the same journal"
        )
    if there is None:
        there = uuid.uuid4().hex
        rows = {"project": PROJECT, "journal_id": there, "epoch": "0"}
        connection.execute(
            sa.insert(info), [{"key": key, "value": value} for key, value in rows.items()]
        )
    return there


def mark(folder: Path, journal_id: str) -> None:
    """Mark the folder as this journal, as the last step of a first opening."""
    for name in (PACKS, SNAPSHOTS):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
    marker = folder / MARKER
    if not marker.exists():
        staging = marker.with_suffix(".partial")
        staging.write_text(json.dumps({"project": PROJECT, "journal_id": journal_id}))
        fsync(staging)
        staging.replace(marker)
    fsync(folder)
