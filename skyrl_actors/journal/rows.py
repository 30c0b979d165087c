"""Convert entries to rows and records of packs, and rows to operations."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from skyrl_actors.journal import tables as t
from skyrl_actors.journal.encoding import to_json
from skyrl_actors.journal.entries import (
    Accepted,
    Answered,
    Audited,
    Blob,
    Entry,
    KeyStored,
    ModeSet,
    Operation,
    QuotaSet,
    SamplerOpened,
    SamplerRetired,
    SessionEnded,
    SessionOpened,
    SnapshotDropped,
    SnapshotTaken,
    Used,
)
from skyrl_actors.journal.images import images_in, without_images
from skyrl_actors.journal.usage import ADD, added_up
from skyrl_actors.messages.usage import Usage

ACCEPT = sa.insert(t.operations)
ANSWER = sa.update(t.operations).where(t.operations.c.number == sa.bindparam("of"))


def statements(entries: Sequence[Entry], blobs: Iterator[Blob]) -> list[tuple[Any, Any]]:
    """Return the statements to execute, each with its parameters."""
    accepted, answered = list[dict[str, Any]](), list[dict[str, Any]]()
    used, others = list[Usage](), list[Entry]()
    for entry in entries:
        if isinstance(entry, Accepted):
            accepted.append(accepted_row(entry, next(blobs)))
        elif isinstance(entry, Answered):
            answered.append(answered_row(entry, next(blobs)))
        elif isinstance(entry, Used):
            used.append(entry.usage)
        else:
            others.append(entry)
    found: list[tuple[Any, Any]] = [
        *([(ACCEPT, accepted)] if accepted else []),
        *([(ANSWER, answered)] if answered else []),
        *([(ADD, added_up(used))] if used else []),
    ]
    return found + [(statement, None) for entry in others for statement in _statements(entry)]


def record_of(entry: Entry) -> Any:
    """Return the part of an entry that is stored in the pack."""
    return (
        without_images(entry.request)
        if isinstance(entry, Accepted)
        else entry.result
        if isinstance(entry, Answered)
        else None
    )


def accepted_row(entry: Accepted, blob: Blob) -> dict[str, Any]:
    """Return the new row of a request. `blob` is the place of its payload."""
    names = (
        "number",
        "request_id",
        "stream",
        "seq_id",
        "digest",
        "model_id",
        "session_id",
        "accepted_at",
    )
    return {
        **{name: getattr(entry, name) for name in names},
        "kind": type(entry.request).__name__,
        "failed": False,
        "payload_pack": blob.pack,
        "payload_offset": blob.offset,
        "payload_length": blob.length,
        "payload_digest": blob.digest,
        "images": " ".join(images_in(entry.request)) or None,
    }


def answered_row(entry: Answered, blob: Blob) -> dict[str, Any]:
    """Return the values that an answer adds to its row. `blob` is the place of the result."""
    return {
        "of": entry.number,
        "answered_at": entry.answered_at,
        "effect": entry.effect,
        "failed": entry.failed,
        "step": entry.step,
        "result_pack": blob.pack,
        "result_offset": blob.offset,
        "result_length": blob.length,
        "result_digest": blob.digest,
    }


def _statements(entry: Entry) -> list[Any]:
    assert not isinstance(entry, Accepted | Answered | Used)
    if isinstance(entry, SessionOpened):
        values = {
            "session_id": entry.session_id,
            "user_metadata": json.dumps(entry.user_metadata),
            "opened_at": entry.opened_at,
        }
        return [sa.insert(t.sessions).values(**values)]
    if isinstance(entry, SessionEnded):
        return [
            sa.update(t.sessions)
            .where(t.sessions.c.session_id == entry.session_id)
            .values(ended_at=entry.ended_at)
        ]
    if isinstance(entry, SamplerOpened):
        names = ("sampler_id", "session_id", "base_model", "model_path", "owner", "number")
        values = {name: getattr(entry, name) for name in names} | {
            "weights": to_json(entry.weights),
            "retired": False,
        }
        again = sa.delete(t.samplers).where(t.samplers.c.sampler_id == entry.sampler_id)
        return [again, sa.insert(t.samplers).values(**values)]
    if isinstance(entry, SamplerRetired):
        return [
            sa.update(t.samplers)
            .where(t.samplers.c.sampler_id == entry.sampler_id)
            .values(retired=True)
        ]
    if isinstance(entry, KeyStored):
        again = sa.delete(t.api_keys).where(t.api_keys.c.digest == entry.key.digest)
        return [again, sa.insert(t.api_keys).values(**asdict(entry.key))]
    if isinstance(entry, QuotaSet):
        row = {"owner": entry.quota.owner, "name": entry.quota.name}
        again = sa.delete(t.quotas).where(t.quotas.c.owner == entry.quota.owner)
        text = json.dumps(asdict(entry.quota.quota))
        return [again, sa.insert(t.quotas).values(**row, quota=text)]
    if isinstance(entry, ModeSet):
        again = sa.delete(t.info).where(t.info.c.key == t.MODE)
        return [again, sa.insert(t.info).values(key=t.MODE, value=entry.mode)]
    if isinstance(entry, Audited):
        return [sa.insert(t.audit).values(**asdict(entry.entry))]
    where = (t.snapshots.c.model_id == entry.model_id, t.snapshots.c.number == entry.number)
    drop = sa.delete(t.snapshots).where(*where)
    if isinstance(entry, SnapshotDropped):
        return [drop]
    assert isinstance(entry, SnapshotTaken)
    names = ("model_id", "number", "step", "folder", "num_bytes", "taken_at")
    return [drop, sa.insert(t.snapshots).values(**{name: getattr(entry, name) for name in names})]


def operation_of(row: Any) -> Operation:
    """Convert a row of the table of operations, without reading payload and result."""

    def blob(name: str) -> Blob | None:
        pack = getattr(row, f"{name}_pack")
        if pack is None:
            return None
        return Blob(
            pack=pack,
            offset=getattr(row, f"{name}_offset"),
            length=getattr(row, f"{name}_length"),
            digest=getattr(row, f"{name}_digest"),
        )

    return Operation(
        number=row.number,
        request_id=row.request_id,
        kind=row.kind,
        stream=row.stream,
        seq_id=row.seq_id,
        digest=row.digest,
        model_id=row.model_id,
        session_id=row.session_id,
        accepted_at=row.accepted_at,
        payload=blob("payload"),
        answered_at=row.answered_at,
        effect=row.effect,
        failed=bool(row.failed),
        step=row.step,
        result=blob("result"),
    )
