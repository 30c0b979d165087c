"""Load the state from which a controller resumes.

It is read by indexes, so the time does not depend on the length of the history. Used sequence
numbers are not included; they are read for each stream when it is used again.
"""

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from skyrl_actors.journal import tables as t
from skyrl_actors.journal.encoding import from_json
from skyrl_actors.journal.entries import (
    JournalState,
    Operation,
    SamplerOpened,
    SessionOpened,
    SnapshotTaken,
)
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.journal.rows import operation_of
from skyrl_actors.messages.keys import ACCESSES, AuditEntry, StoredKey
from skyrl_actors.messages.operating import MODES, Mode
from skyrl_actors.messages.usage import OwnerQuota, Quota
from skyrl_actors.messages.weights import SamplerWeights

RECENT = 10_000
LIVE = sa.select(t.sessions.c.session_id).where(t.sessions.c.ended_at.is_(None))
OP = t.operations.c


def drop_unanswered(connection: sa.Connection) -> None:
    """Forget snapshots that were taken after an operation and before its answer.

    Such an operation read files. It runs again, may fail now, and must then have changed nothing.
    """
    unanswered = sa.select(OP.number).where(t.OWED)
    connection.execute(sa.delete(t.snapshots).where(t.snapshots.c.number.in_(unanswered)))


def load(connection: sa.Connection, kinds: Kinds, epoch: int) -> JournalState:
    """Load all open sessions, samplers, models and unanswered requests."""
    last = connection.execute(sa.select(sa.func.max(OP.number))).scalar() or 0
    marked = connection.execute(
        sa.select(t.info.c.value).where(t.info.c.key == t.LAST_NUMBER)
    ).scalar()
    sessions = connection.execute(sa.select(t.sessions).where(t.sessions.c.ended_at.is_(None)))
    samplers = connection.execute(
        sa.select(t.samplers).where(~t.samplers.c.retired).order_by(t.samplers.c.number)
    )
    owed = connection.execute(sa.select(t.operations).where(t.OWED)).all()
    recent = sa.select(OP.request_id, OP.answered_at).order_by(OP.number.desc()).limit(RECENT)
    operations = {row.number: operation_of(row) for row in owed}
    snapshots: list[SnapshotTaken] = []
    for creation in _creations(connection, kinds):
        snapshot = newest_snapshot(connection, str(creation.model_id))
        snapshots += [snapshot] if snapshot else []
        operations[creation.number] = creation
        operations |= {op.number: op for op in _changes(connection, kinds, creation, snapshot)}
    return JournalState(
        epoch=epoch,
        next_number=max(last, int(marked or 0)) + 1,
        sessions=tuple(
            SessionOpened(s.session_id, json.loads(s.user_metadata), s.opened_at) for s in sessions
        ),
        samplers=tuple(
            SamplerOpened(
                sampler_id=s.sampler_id,
                session_id=s.session_id,
                base_model=s.base_model,
                model_path=s.model_path,
                weights=from_json(s.weights),
                owner=s.owner,
                number=s.number,
            )
            for s in samplers
        ),
        operations=tuple(operations[number] for number in sorted(operations)),
        snapshots=tuple(snapshots),
        keys=tuple(
            StoredKey(**row) for row in connection.execute(sa.select(t.api_keys)).mappings()
        ),
        quotas=tuple(
            OwnerQuota(owner=row.owner, name=row.name, quota=Quota(**json.loads(row.quota)))
            for row in connection.execute(sa.select(t.quotas))
        ),
        mode=_mode(connection),
        recent=frozenset(
            row.request_id for row in connection.execute(recent) if row.answered_at is not None
        ),
    )


def _mode(connection: sa.Connection) -> Mode:
    query = sa.select(t.info.c.value).where(t.info.c.key == t.MODE)
    found = connection.execute(query).scalar()
    modes: dict[str, Mode] = {mode: mode for mode in MODES}
    return modes.get(found or "", "running")


def newest_acts(
    engine: sa.Engine, last: int, since: float, until: float | None
) -> list[AuditEntry]:
    """Return the newest acts from `since` to before `until`, oldest first.

    At most `last` acts of operators and as many accesses to checkpoints: tenants cause the latter,
    and must not hide the former.
    """
    c = t.audit.c
    query = sa.select(c.number, c.at, c.actor, c.act, c.subject).where(c.at >= since)
    if until is not None:
        query = query.where(c.at < until)
    query = query.order_by(c.number.desc()).limit(last)
    is_access = c.act.in_(ACCESSES)
    with engine.connect() as connection:
        kinds = [query.where(is_access), query.where(~is_access)]
        found = [row for kind in kinds for row in connection.execute(kind).all()]
    return [
        AuditEntry(at=at, actor=who, act=act, subject=of) for _, at, who, act, of in sorted(found)
    ]


def _creations(connection: sa.Connection, kinds: Kinds) -> list[Operation]:
    """Return the creations of living models."""
    unload = t.operations.alias().c
    unloaded = sa.select(unload.model_id).where(
        t.LIFETIMES,
        unload.kind == kinds.ends,
        unload.answered_at.is_not(None),
        ~unload.failed,
    )
    query = sa.select(t.operations).where(
        t.LIFETIMES,
        OP.kind == kinds.creates,
        OP.session_id.in_(LIVE),
        ~OP.failed,
        OP.model_id.not_in(unloaded),
    )
    return [operation_of(row) for row in connection.execute(query)]


def was_unloaded(engine: sa.Engine, kinds: Kinds, model_id: str) -> bool:
    """Return whether a model was unloaded. Sweeps keep that while its session is open."""
    query = sa.select(OP.number).where(
        t.LIFETIMES,
        OP.kind == kinds.ends,
        OP.model_id == model_id,
        OP.answered_at.is_not(None),
        ~OP.failed,
    )
    with engine.connect() as connection:
        return connection.execute(query.limit(1)).first() is not None


def models(engine: sa.Engine) -> list[dict[str, Any]]:
    """Return one row for each model: id, operations, step, first and last time."""
    query = (
        sa.select(
            OP.model_id,
            sa.func.count().label("operations"),
            sa.func.max(OP.step).label("step"),
            sa.func.min(OP.accepted_at).label("first"),
            sa.func.max(OP.accepted_at).label("last"),
        )
        .where(OP.model_id.is_not(None))
        .group_by(OP.model_id)
        .order_by(sa.func.min(OP.number))
    )
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def newest_snapshot(connection: sa.Connection, model_id: str) -> SnapshotTaken | None:
    """Return the snapshot of a model's newest operation, or None if there is no snapshot."""
    column = t.snapshots.c
    query = (
        sa.select(t.snapshots)
        .where(column.model_id == model_id)
        .order_by(column.number.desc())
        .limit(1)
    )
    row = connection.execute(query).mappings().first()
    return SnapshotTaken(**row) if row else None


def last_settled(connection: sa.Connection, kinds: Kinds, model_id: str) -> int | None:
    """Return the newest operation of a model after which no earlier one is pending."""
    query = (
        sa.select(OP.number)
        .where(OP.model_id == model_id, OP.kind.in_(kinds.settles), OP.effect != "none")
        .order_by(OP.number.desc())
        .limit(1)
    )
    return connection.execute(query).scalar()


def _changes(
    connection: sa.Connection, kinds: Kinds, creation: Operation, snapshot: SnapshotTaken | None
) -> Sequence[Operation]:
    """Return the operations after a snapshot that changed the model, or should have."""
    settled = last_settled(connection, kinds, str(creation.model_id))
    since = 0 if settled is None else min(settled, snapshot.number if snapshot else 0)
    query = sa.select(t.operations).where(
        OP.model_id == creation.model_id,
        OP.number >= since,
        OP.answered_at.is_not(None),
        sa.or_(OP.effect != "none", sa.and_(OP.kind.in_(kinds.failure_matters), OP.failed)),
    )
    return [operation_of(row) for row in connection.execute(query.order_by(OP.number))]


def newest_answered(
    connection: sa.Connection, stream: str, before: int, limit: int
) -> list[Operation]:
    """Return the newest answered operations of a stream below `before`, in order.

    Only operations with a sequence number are included.
    """
    found: list[Operation] = []
    for whose in (OP.model_id == stream, sa.and_(t.OF_SAMPLERS, OP.stream == stream)):
        query = sa.select(t.operations).where(
            whose, OP.number < before, OP.answered_at.is_not(None), OP.seq_id.is_not(None)
        )
        rows = connection.execute(query.order_by(OP.number.desc()).limit(limit))
        found += [operation_of(row) for row in rows]
    return sorted(found, key=lambda op: op.number)


def retired_weights(connection: sa.Connection) -> list[SamplerWeights]:
    """Return the weights of retired samplers whose rows were not removed yet."""
    rows = connection.execute(sa.select(t.samplers.c.weights).where(t.samplers.c.retired))
    return [from_json(row.weights) for row in rows]
