"""The journal on SQL and files, for an event loop.

It writes by group commit and reads in other threads.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from skyrl_actors import clock
from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.journal import mirrored, opening, stored_images
from skyrl_actors.journal import usage as stored_usage
from skyrl_actors.journal.encoding import decode
from skyrl_actors.journal.entries import Entry, JournalState, Operation, SnapshotTaken
from skyrl_actors.journal.group_commit import GroupCommit, reason
from skyrl_actors.journal.images import images_in, with_images
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.journal.loading import newest_acts, was_unloaded
from skyrl_actors.journal.locks import LOCK_WAIT_S, DatabaseLock, FolderLock
from skyrl_actors.journal.packs import PackStore
from skyrl_actors.journal.retention import KEEP_SNAPSHOTS, Retention
from skyrl_actors.journal.snapshots import SnapshotFolders
from skyrl_actors.journal.store import Store
from skyrl_actors.journal.sweeping import Sweeper, Swept
from skyrl_actors.journal.watchdog import Watchdog
from skyrl_actors.messages.errors import (
    ConfigError,
    Corrupt,
    InternalError,
    SkyrlActorsError,
    Unavailable,
)
from skyrl_actors.messages.keys import AuditEntry
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Result
from skyrl_actors.messages.usage import Usage
from skyrl_actors.messages.weights import SamplerWeights

log = logging.getLogger(__name__)
T = TypeVar("T")
COPIES = 4  # snapshots whose files are written, uploaded or removed at a time
FAULTS = (OSError, SQLAlchemyError, SkyrlActorsError, ValueError, TypeError, OverflowError)


class SqlJournal:
    """Implements `Journal` on SQL and files. `wall` returns seconds since the epoch."""

    def __init__(self, config: JournalConfig, kinds: Kinds, wall: Callable[[], float] = clock.now):
        self.config = config
        self._kinds = kinds
        self.wall = wall
        self.folder = config.folder.expanduser().resolve()
        self._url = opening.database_url(self.folder, config.url)
        self._mirror = mirrored.mirror_of(config.mirror)
        self._folders = SnapshotFolders(self.folder / opening.SNAPSHOTS, wall, self._mirror)
        self._packs = PackStore(self.folder / opening.PACKS, self._mirror)
        self._copying = ThreadPoolExecutor(COPIES, "journal-snapshots")
        self._retired = set[str]()  # samplers, as the last sweep saw them
        self._store: Store | None = None
        self._commits: GroupCommit | None = None
        # of this object's sessions in the database
        self._name = f"skyrl-actors {uuid.uuid4().hex[:16]}"
        self._folder_lock: FolderLock | None = None
        self._database_lock: DatabaseLock | None = None
        self._watchdog: Watchdog | None = None

    @property
    def store(self) -> Store:
        if self._store is None:
            raise InternalError("the journal is not open")
        return self._store

    def check(self) -> None:
        """Check that the journal could be opened, before any process starts. Raises ConfigError."""
        opening.check_folder(self.folder)
        with ExitStack() as undo, self._refused():
            undo.callback(self._release)
            self._take_lock("", 0.0)
            if self._mirror is not None:
                mirrored.prepare(self.folder, self._mirror)
            engine = opening.connect(self._url)
            undo.callback(engine.dispose)
            marked = (self.folder / opening.MARKER).exists()
            opening.migrate(engine, self.folder, marked, only_check=True)

    async def open(self, holder: str, wait: bool = False) -> JournalState:
        return await asyncio.to_thread(self._open, holder, math.inf if wait else LOCK_WAIT_S)

    def _open(self, holder: str, wait_s: float = LOCK_WAIT_S) -> JournalState:
        opening.check_folder(self.folder)
        with ExitStack() as undo, self._refused():
            undo.callback(self._release)
            self._take_lock(holder, wait_s)
            if self._mirror is not None:
                mirrored.prepare(self.folder, self._mirror)
            engine = opening.connect(self._url, self._name)
            undo.callback(engine.dispose)
            marked = (self.folder / opening.MARKER).exists()
            opening.mark(self.folder, opening.migrate(engine, self.folder, marked))
            self._store = Store(engine, self._packs)
            journal_state = self._store.begin_epoch(
                holder, self._kinds, opening.last_epoch(self.folder)
            )
            opening.note_epoch(self.folder, journal_state.epoch)
            if self._mirror is not None:
                mirrored.begin(self.folder, self._mirror, journal_state.epoch)
            # Remove what an interrupted snapshot left. The first sweep checks the packs.
            self._folders.sweep(self._store.snapshot_folders())
            if engine.dialect.name == "postgresql":
                self._watchdog = Watchdog(engine)
            self._commits = GroupCommit(self._store.write)
            undo.pop_all()
            return journal_state

    def _refused(self) -> AbstractContextManager[None]:
        return _refused(f"the journal's database {self._url} cannot be used")

    def _take_lock(self, holder: str, wait_s: float) -> None:
        """Take the lock of the database. A folder belongs to one database, by its marker."""
        if self._url.get_backend_name() == "sqlite":
            self._folder_lock = FolderLock(self.folder, holder, wait_s)
        else:
            self._database_lock = DatabaseLock(self._url, self._name)
            self._database_lock.take(wait_s)

    def _release(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.release()
        if self._database_lock is not None:
            self._database_lock.close()

    @property
    def trouble(self) -> str | None:
        if self._commits is None or self._store is None:
            return None
        return self._store.waiting or self._commits.trouble or self._commits.slow

    @property
    def lost(self) -> str | None:
        return None if self._store is None else self._store.lost

    @property
    def deposed(self) -> str | None:
        by_lock = self._database_lock.deposed if self._database_lock is not None else None
        return by_lock or (self._store.fenced if self._store is not None else None)

    @property
    def is_silent(self) -> bool:
        return self._database_lock is not None and self._database_lock.is_silent

    @property
    def ended_silent(self) -> bool:
        return self._database_lock is not None and self._database_lock.ended_silent

    @property
    def _writer(self) -> GroupCommit:
        if self._commits is None:
            raise InternalError("the journal is not open")
        return self._commits

    async def write(self, *entries: Entry) -> None:
        await self._writer.write(entries)

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.to_thread(function, *arguments)
        except (SQLAlchemyError, OSError) as error:
            raise Unavailable(f"the journal cannot be read now: {reason(error)}") from None

    async def request(self, operation: Operation) -> Request:
        if operation.payload is None:
            raise Corrupt(
                f"the payload of operation {operation.number} was swept: "
                "it is older than journal.retention_s"
            )
        request = decode(await self._read(self._packs.read, operation.payload))
        # A request of an older version has the contents of its images itself.
        images = images_in(request)
        if missing := [digest for digest, content in images.items() if not content]:
            read = stored_images.read
            images |= await self._read(read, self.store.engine, self._packs, missing)
            return with_images(request, images)
        return request

    async def result(self, operation: Operation) -> Result:
        if operation.result is None:
            raise Corrupt(
                f"the result of operation {operation.number} was swept: "
                "it is older than journal.retention_s"
            )
        return decode(await self._read(self._packs.read, operation.result))

    async def find(self, request_id: str) -> Operation | None:
        return await self._read(self.store.find, request_id)

    async def operations(self, model_id: str, after: int, upto: int) -> list[Operation]:
        return await self._read(self.store.operations, model_id, after, upto)

    async def trimmed(self, model_id: str) -> int:
        return await self._read(self.store.trimmed, model_id)

    async def newest_answered(self, stream: str, before: int, limit: int) -> list[Operation]:
        return await self._read(self.store.newest_answered, stream, before, limit)

    async def snapshots(self, model_id: str) -> list[SnapshotTaken]:
        return await self._read(self.store.snapshots, model_id)

    async def was_unloaded(self, model_id: str) -> bool:
        return await self._read(was_unloaded, self.store.engine, self._kinds, model_id)

    async def retired_weights(self) -> list[SamplerWeights]:
        return await self._read(self.store.retired_weights)

    async def _with_files(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that copies files of snapshots, apart from the reads of rows."""
        return await asyncio.get_running_loop().run_in_executor(self._copying, function, *arguments)

    async def stage_snapshot(self, model_id: str, number: int) -> Path:
        try:
            return await self._with_files(self._folders.stage, model_id, number)
        except OSError as error:
            raise Unavailable(f"no snapshot of {model_id}: {error}") from None

    async def drop_staging(self, staging: Path) -> None:
        await self._with_files(self._folders.remove, staging.name)

    async def seal_snapshot(
        self, staging: Path, model_id: str, number: int, step: int
    ) -> SnapshotTaken:
        try:
            snapshot = await self._with_files(self._folders.seal, staging, model_id, number, step)
        except OSError as error:
            raise Unavailable(f"no snapshot of {model_id}: {error}") from None
        try:
            await self.write(snapshot)
        except Unavailable:
            if not self.store.unsure:  # otherwise a row may name it; the next start decides
                await self._with_files(self._folders.remove, snapshot.folder)
            raise
        return snapshot

    async def verified_snapshot(self, snapshot: SnapshotTaken) -> Path:
        return await self._read(self._folders.verify, snapshot)

    async def audit(
        self, last: int, since: float = 0.0, until: float | None = None
    ) -> list[AuditEntry]:
        return await self._read(newest_acts, self.store.engine, last, since, until)

    async def usage(self, since: float, until: float, owner: str | None = None) -> list[Usage]:
        return await self._read(stored_usage.read, self.store.engine, since, until, owner)

    async def sweep(self, unfreed: Collection[str] = ()) -> int:
        policy = Retention(self.config.retention_s, KEEP_SNAPSHOTS)
        sweeper = Sweeper(self.store, self._kinds, policy, self.wall(), unfreed, self._retired)
        try:
            freed = await self._sweep(sweeper.steps())
            if not self._is_held:
                # Not by the writer: to list a mirror can take long.
                suspects = await self._with_files(self.store.take_suspects)
                freed += await self._sweep(sweeper.orphans(suspects))
            return freed
        except FAULTS as error:
            raise Unavailable(f"the journal was not swept: {reason(error)}") from None

    @property
    def _is_held(self) -> bool:
        return opening.is_held(self.folder, self.wall())

    async def _sweep(self, steps: Iterator[Swept]) -> int:
        freed = 0
        while not self._is_held:
            began = time.monotonic()
            step = await self._writer.between(lambda: next(steps, None))
            if step is None:
                break
            freed += step.num_bytes
            for name in step.folders:
                freed += await self._with_files(self._folders.remove, name)
            if step.rows:  # leave half of the writer's time to writes
                await asyncio.sleep(time.monotonic() - began)
        return freed

    async def close(self) -> None:
        if self._store is not None:
            self._store.closing.set()
        if self._commits is not None:
            await self._commits.close()
        self._copying.shutdown(wait=False)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        if self._store is not None:
            self._store.close()
        self._release()


@contextmanager
def reading(config: JournalConfig) -> Generator[Store]:
    """Open a journal for reading only, beside a service that may write. Raises ConfigError."""
    folder = config.folder.expanduser().resolve()
    if not (folder / opening.MARKER).is_file():
        raise ConfigError(
            f"{folder} is no journal (it has no {opening.MARKER}); set journal.folder to one"
        )
    engine = opening.connect(opening.database_url(folder, config.url))
    try:
        with _refused(f"the journal's database {engine.url} cannot be used"):
            opening.migrate(engine, folder, True, only_check=True)
            yield Store(
                engine, PackStore(folder / opening.PACKS, mirrored.mirror_of(config.mirror))
            )
    finally:
        engine.dispose()


@contextmanager
def _refused(what: str) -> Generator[None]:
    """Convert errors of files and databases to ConfigError."""
    try:
        yield
    except SQLAlchemyError as error:
        raise ConfigError(f"{what}: {reason(error)}") from None
    except OSError as error:
        raise ConfigError(f"{what}: {error}") from None
