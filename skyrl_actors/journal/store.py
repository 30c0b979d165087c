"""The journal's rows and packs, synchronously: one `commit` is one pack and one transaction. Called from one thread."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from skyrl_actors.journal import tables as t
from skyrl_actors.journal.encoding import encode, from_json, to_json
from skyrl_actors.journal.entries import (
    Accepted,
    Answered,
    Blob,
    Books,
    Entry,
    Operation,
    SamplerOpened,
    SamplerRetired,
    SessionEnded,
    SessionOpened,
    SnapshotDropped,
    SnapshotTaken,
)
from skyrl_actors.journal.packs import PackStore
from skyrl_actors.messages.errors import InternalError


class Fenced(InternalError):
    """Another process has opened the journal since: this one may not write any more."""


class Store:
    def __init__(self, engine: sa.Engine, packs: PackStore):
        self.engine = engine
        self.packs = packs
        self.epoch = 0
        self._inode: int | None = None

    @property
    def _file(self) -> Path | None:
        name = self.engine.url.database
        return Path(name) if self.engine.dialect.name == "sqlite" and name else None

    def begin_epoch(self, holder: str) -> Books:
        """Fence off whoever wrote before, and read what is known."""
        if self._file is not None:
            self._inode = self._file.stat().st_ino
        with self.engine.begin() as connection:
            key = t.info.c.key
            found = connection.execute(sa.select(t.info.c.value).where(key == "epoch").with_for_update()).scalar_one()
            self.epoch = int(found) + 1
            connection.execute(sa.update(t.info).where(key == "epoch").values(value=str(self.epoch)))
            connection.execute(sa.delete(t.info).where(key == "holder"))
            connection.execute(sa.insert(t.info).values(key="holder", value=holder))
            return self._books(connection)

    def _books(self, connection: sa.Connection) -> Books:
        last = connection.execute(sa.select(sa.func.max(t.operations.c.number))).scalar() or 0
        live = sa.select(t.sessions.c.session_id).where(t.sessions.c.ended_at.is_(None))
        sessions = connection.execute(sa.select(t.sessions).where(t.sessions.c.ended_at.is_(None)))
        samplers = connection.execute(sa.select(t.samplers).where(~t.samplers.c.retired).order_by(t.samplers.c.number))
        wanted = sa.or_(t.operations.c.answered_at.is_(None), t.operations.c.session_id.in_(live))
        rows = connection.execute(sa.select(t.operations).where(wanted).order_by(t.operations.c.number))
        return Books(
            self.epoch,
            last + 1,
            tuple(SessionOpened(s.session_id, json.loads(s.user_metadata), s.opened_at) for s in sessions),
            tuple(
                SamplerOpened(s.sampler_id, s.session_id, s.base_model, s.model_path, from_json(s.weights), s.owner, s.number)
                for s in samplers
            ),
            tuple(_operation(row) for row in rows),
        )

    def commit(self, entries: Sequence[Entry]) -> None:
        """All entries, or none."""
        self._check_file()
        blobs = self.packs.write([encode(record) for entry in entries if (record := _record(entry)) is not None])
        placed = iter(blobs)
        accepted, answered, others = [], [], []
        for entry in entries:
            if isinstance(entry, Accepted):
                accepted.append(_accepted_row(entry, next(placed)))
            elif isinstance(entry, Answered):
                answered.append(_answered_row(entry, next(placed)))
            else:
                others.append(entry)
        with self.engine.begin() as connection:
            fence = sa.update(t.info).where(t.info.c.key == "epoch", t.info.c.value == str(self.epoch))
            if connection.execute(fence.values(value=str(self.epoch))).rowcount != 1:
                raise Fenced("another service has opened this journal since; this one may not write to it any more")
            if accepted:
                connection.execute(sa.insert(t.operations), accepted)
            if answered:
                update = sa.update(t.operations).where(t.operations.c.number == sa.bindparam("of"))
                connection.execute(update, answered)
            for entry in others:
                for statement in _statements(entry):
                    connection.execute(statement)
        self._check_file()

    def _check_file(self) -> None:
        """SQLite goes on writing into a file that was deleted: nobody would ever read that again."""
        if self._file is not None and (not self._file.exists() or self._file.stat().st_ino != self._inode):
            self.engine.dispose()
            raise OSError(f"the journal's database {self._file} was removed or replaced")

    def find(self, request_id: str) -> Operation | None:
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(t.operations).where(t.operations.c.request_id == request_id)).first()
        return _operation(row) if row else None

    def operations(self, model_id: str, after: int, upto: int) -> list[Operation]:
        column = t.operations.c
        query = sa.select(t.operations).where(column.model_id == model_id, column.number > after, column.number <= upto)
        with self.engine.connect() as connection:
            return [_operation(row) for row in connection.execute(query.order_by(column.number))]

    def models(self) -> list[dict[str, Any]]:
        """One row a model: id, operations, step, first and last time."""
        column = t.operations.c
        query = (
            sa.select(
                column.model_id, sa.func.count().label("operations"), sa.func.max(column.step).label("step"),
                sa.func.min(column.accepted_at).label("first"), sa.func.max(column.accepted_at).label("last"),
            )
            .where(column.model_id.is_not(None)).group_by(column.model_id).order_by(sa.func.min(column.number))
        )  # fmt: skip
        with self.engine.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

    def snapshots(self, model_id: str) -> list[SnapshotTaken]:
        query = sa.select(t.snapshots).where(t.snapshots.c.model_id == model_id).order_by(t.snapshots.c.number.desc())
        with self.engine.connect() as connection:
            return [SnapshotTaken(**row._mapping) for row in connection.execute(query)]

    def snapshot_folders(self) -> set[str]:
        with self.engine.connect() as connection:
            return set(connection.execute(sa.select(t.snapshots.c.folder)).scalars())

    def used_packs(self) -> set[str]:
        column = t.operations.c
        with self.engine.connect() as connection:
            pairs = connection.execute(sa.select(column.payload_pack, column.result_pack)).all()
        return {name for pair in pairs for name in pair if name}

    def forget_records(self, model_id: str, upto: int) -> None:
        """Payloads and results of a model's operations up to there are no longer asked for; their headers stay, and what
        says which model it is."""
        none = dict.fromkeys(("payload_pack", "result_pack"))
        column = t.operations.c
        where = (
            column.model_id == model_id,
            column.number <= upto,
            column.answered_at.is_not(None),
            column.kind != "CreateModel",
        )
        with self.engine.begin() as connection:
            connection.execute(sa.update(t.operations).where(*where).values(**none))

    def forget_old(self, before: float) -> None:
        """Records of answered operations that no replay needs: samples, and what left its model as it was."""
        column = t.operations.c
        idle = sa.or_(column.model_id.is_(None), column.effect == "none")
        where = (column.answered_at < before, idle, column.kind != "CreateModel")
        with self.engine.begin() as connection:
            connection.execute(sa.update(t.operations).where(*where).values(payload_pack=None, result_pack=None))

    def loads(self, model_id: str) -> set[int]:
        """Operations that read files which are not the journal's: they can not be replayed, only their snapshots help."""
        column = t.operations.c
        kinds = ("LoadWeights", "CreateModel")
        query = sa.select(column.number).where(column.model_id == model_id, column.kind.in_(kinds))
        with self.engine.connect() as connection:
            return set(connection.execute(query).scalars())

    def forget_ended(self, before: float) -> list[str]:
        """Delete all rows of sessions that ended before that time; returns their snapshot folders."""
        column = t.operations.c
        with self.engine.begin() as connection:
            ended = connection.execute(sa.select(t.sessions.c.session_id).where(t.sessions.c.ended_at < before)).scalars().all()
            models = connection.execute(sa.select(column.model_id).where(column.session_id.in_(ended)).distinct()).scalars().all()
            gone = connection.execute(sa.select(t.snapshots.c.folder).where(t.snapshots.c.model_id.in_(models))).scalars().all()
            connection.execute(sa.delete(t.snapshots).where(t.snapshots.c.model_id.in_(models)))
            connection.execute(sa.delete(t.samplers).where(t.samplers.c.session_id.in_(ended), t.samplers.c.retired))
            connection.execute(sa.delete(t.operations).where(column.session_id.in_(ended), column.answered_at.is_not(None)))
            connection.execute(sa.delete(t.sessions).where(t.sessions.c.session_id.in_(ended)))
            # samples of samplers that belong to no session
            lost = (column.session_id.is_(None), column.answered_at < before)
            connection.execute(sa.delete(t.operations).where(*lost))
        return list(gone)

    def oldest_sampler(self, model_id: str) -> int | None:
        """The operation that froze the oldest unnamed version of a model that may still be sampled."""
        column = t.samplers.c
        query = sa.select(sa.func.min(column.number)).where(column.owner == model_id, ~column.retired)
        with self.engine.connect() as connection:
            return connection.execute(query).scalar()

    def live_models(self) -> list[str]:
        live = sa.select(t.sessions.c.session_id).where(t.sessions.c.ended_at.is_(None))
        query = sa.select(t.operations.c.model_id).where(
            t.operations.c.kind == "CreateModel", t.operations.c.session_id.in_(live)
        )
        with self.engine.connect() as connection:
            return [name for name in connection.execute(query).scalars() if name]


def _record(entry: Entry) -> Any:
    """What goes into the pack."""
    return entry.request if isinstance(entry, Accepted) else entry.result if isinstance(entry, Answered) else None


def _accepted_row(entry: Accepted, blob: Blob) -> dict[str, Any]:
    names = ("number", "request_id", "stream", "seq_id", "digest", "model_id", "session_id", "accepted_at")
    return {
        **{name: getattr(entry, name) for name in names}, "kind": type(entry.request).__name__, "failed": False,
        "payload_pack": blob.pack, "payload_offset": blob.offset, "payload_length": blob.length, "payload_digest": blob.digest,
    }  # fmt: skip


def _answered_row(entry: Answered, blob: Blob) -> dict[str, Any]:
    return {
        "of": entry.number, "answered_at": entry.answered_at, "effect": entry.effect, "failed": entry.failed, "step": entry.step,
        "result_pack": blob.pack, "result_offset": blob.offset, "result_length": blob.length, "result_digest": blob.digest,
    }  # fmt: skip


def _statements(entry: Entry) -> list[Any]:
    assert not isinstance(entry, Accepted | Answered)
    if isinstance(entry, SessionOpened):
        values = {"session_id": entry.session_id, "user_metadata": json.dumps(entry.user_metadata), "opened_at": entry.opened_at}
        return [sa.insert(t.sessions).values(**values)]
    if isinstance(entry, SessionEnded):
        return [sa.update(t.sessions).where(t.sessions.c.session_id == entry.session_id).values(ended_at=entry.ended_at)]
    if isinstance(entry, SamplerOpened):
        names = ("sampler_id", "session_id", "base_model", "model_path", "owner", "number")
        values = {name: getattr(entry, name) for name in names} | {"weights": to_json(entry.weights), "retired": False}
        again = sa.delete(t.samplers).where(t.samplers.c.sampler_id == entry.sampler_id)
        return [again, sa.insert(t.samplers).values(**values)]
    if isinstance(entry, SamplerRetired):
        return [sa.update(t.samplers).where(t.samplers.c.sampler_id == entry.sampler_id).values(retired=True)]
    where = (t.snapshots.c.model_id == entry.model_id, t.snapshots.c.number == entry.number)
    drop = sa.delete(t.snapshots).where(*where)
    if isinstance(entry, SnapshotDropped):
        return [drop]
    assert isinstance(entry, SnapshotTaken)
    names = ("model_id", "number", "step", "folder", "num_bytes", "taken_at")
    return [drop, sa.insert(t.snapshots).values(**{name: getattr(entry, name) for name in names})]


def _operation(row: Any) -> Operation:
    def blob(name: str) -> Blob | None:
        pack = getattr(row, f"{name}_pack")
        if pack is None:
            return None
        return Blob(pack, getattr(row, f"{name}_offset"), getattr(row, f"{name}_length"), getattr(row, f"{name}_digest"))

    return Operation(
        row.number, row.request_id, row.kind, row.stream, row.seq_id, row.digest, row.model_id, row.session_id, row.accepted_at,
        blob("payload"), row.answered_at, row.effect, bool(row.failed), row.step, blob("result"),
    )  # fmt: skip


def holder_text(name: str) -> str:
    return f"service {name!r} (process {os.getpid()} on {os.uname().nodename})"
