"""Remove what retention no longer needs, in steps so short that writes hardly wait.

Each step is one transaction on the journal's writing thread, and none is after another service has
opened the journal. A row is removed with its records.
Packs count the rows that refer to them, and a pack is removed with its last row.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from skyrl_actors.journal import loading, stored_images, usage
from skyrl_actors.journal import tables as t
from skyrl_actors.journal.encoding import from_json
from skyrl_actors.journal.entries import SnapshotDropped
from skyrl_actors.journal.kinds import Kinds
from skyrl_actors.journal.retention import Retention, plan_sweep
from skyrl_actors.journal.store import Store
from skyrl_actors.messages.keys import ACCESSES

STEP_S = 0.01  # target time of a step; the size of chunks adapts to it
SMALLEST, LARGEST = 20, 100  # rows of a chunk
IMAGES_OF_STEP = 200  # of the rows of a chunk, if it has more than one
OP = t.operations.c
ANSWERED = OP.answered_at.is_not(None)
RELEASE = (
    sa.update(t.packs)
    .where(t.packs.c.name == sa.bindparam("of"))
    .values(records=t.packs.c.records - sa.bindparam("released"))
)

TRIM = sa.text(
    "INSERT INTO trimmed (model_id, number) VALUES (:model_id, :number) "
    "ON CONFLICT (model_id) DO UPDATE SET number = :number"
)


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of one step. `folders` are those of snapshots without a row."""

    rows: int = 0
    num_bytes: int = 0
    folders: tuple[str, ...] = ()


class Sweeper:
    """One sweep of the journal.

    `now` is in seconds since the epoch. A retired sampler stays while its version is in `unfreed`,
    so that a start after a kill can free its weights. It also stays if the sweep before did not see
    it: its weights may be about to be freed. `seen` has the samplers that it saw, and gets those
    that this one sees.
    """

    def __init__(
        self,
        store: Store,
        kinds: Kinds,
        policy: Retention,
        now: float,
        unfreed: Collection[str],
        seen: set[str],
    ):
        self._store = store
        self._kinds = kinds
        self._policy = policy
        self._now = now
        self._unfreed, self._seen = unfreed, seen
        self._before = now - policy.retention_s
        self._size = 50

    def steps(self) -> Iterator[Swept]:
        """Run one step for each `next`."""
        self._store.mark_last_number()
        yield Swept()
        yield from self._ended_sessions()
        yield from self._idle()
        for model_id in self._unloaded_models():
            yield from self._chunks(
                OP.model_id == model_id,
                ANSWERED,
                sa.or_(OP.kind != self._kinds.ends, OP.session_id.not_in(loading.LIVE)),
            )
        for model_id in self._live_models():
            yield from self._model(model_id)
        yield self._retired_samplers()
        yield self._old_usage()

    def _ended_sessions(self) -> Iterator[Swept]:
        column = t.sessions.c
        for session_id in self._ids(
            sa.select(column.session_id).where(column.ended_at < self._before)
        ):
            yield from self._chunks(OP.session_id == session_id, ANSWERED)
            left = sa.exists().where(OP.session_id == session_id)  # unanswered ones
            with self._store.removing() as connection:
                connection.execute(
                    sa.delete(t.sessions).where(column.session_id == session_id, ~left)
                )

    def _idle(self) -> Iterator[Swept]:
        """Remove samples and answered operations that did not change their model.

        Some determine a model's state and are kept: its creation and end, missing gradients, and
        the origin of an open sampler.
        """
        kept = sa.select(t.samplers.c.number).where(
            ~t.samplers.c.retired, t.samplers.c.number.is_not(None)
        )
        yield from self._chunks(
            t.IDLE,
            OP.answered_at < self._before,
            OP.kind.not_in((self._kinds.creates, self._kinds.ends)),
            sa.not_(sa.and_(OP.kind.in_(self._kinds.failure_matters), OP.failed)),
            OP.number.not_in(kept),
            order=OP.answered_at,
        )
        yield from self._chunks(
            t.IDLE,
            OP.answered_at < self._before,
            OP.kind == self._kinds.creates,
            order=OP.answered_at,
        )

    def _unloaded_models(self) -> Sequence[str]:
        """Return unloaded models with operations that are not needed.

        The unload itself is needed while its session is open: its model's id is not used again.
        """
        other = t.operations.alias().c
        where = (
            t.LIFETIMES,
            OP.kind == self._kinds.ends,
            OP.answered_at < self._before,
            ~OP.failed,
            sa.or_(
                OP.session_id.not_in(loading.LIVE),
                sa.exists().where(other.model_id == OP.model_id, other.kind != self._kinds.ends),
            ),
        )
        return self._ids(sa.select(OP.model_id).where(*where))

    def _live_models(self) -> Sequence[str]:
        query = sa.select(OP.model_id).where(
            t.LIFETIMES, OP.kind == self._kinds.creates, OP.session_id.in_(loading.LIVE)
        )
        return self._ids(query)

    def _model(self, model_id: str) -> Iterator[Swept]:
        store, snapshots = self._store, self._store.snapshots(model_id)
        # An operation that read files cannot be replayed, so the snapshot after it is kept.
        numbers = [snapshot.number for snapshot in snapshots]
        pinned = store.of_kinds(model_id, numbers, self._kinds.reads_files)
        plan = plan_sweep(
            self._policy, snapshots, store.oldest_sampler(model_id), pinned, self._now
        )
        for snapshot in plan.drop:
            store.write([SnapshotDropped(model_id, snapshot.number)])
            yield Swept(folders=(snapshot.folder,))
        if plan.forget_upto is None:
            return
        with store.engine.connect() as connection:
            settled = loading.last_settled(connection, self._kinds, model_id)
        # Failures since then explain missing gradients, so they are kept.
        bound = min(plan.forget_upto, settled or 0)
        if not bound:
            return
        # This comes first, so that no rebuild omits what is removed.
        with store.removing() as connection:
            connection.execute(TRIM, {"model_id": model_id, "number": bound - 1})
        yield from self._chunks(
            OP.model_id == model_id, OP.number < bound, ANSWERED, OP.kind != self._kinds.creates
        )
        yield self._without_records(model_id, plan.forget_upto)

    def _without_records(self, model_id: str, number: int) -> Swept:
        """Empty the operation before a snapshot, whose payload is in the snapshot.

        The row is kept, because its step can be restored.
        """
        where = (
            OP.model_id == model_id,
            OP.number == number,
            OP.kind != self._kinds.creates,
            ANSWERED,
        )
        with self._store.removing() as connection:
            rows = connection.execute(
                sa.select(OP.payload_pack, OP.result_pack, OP.images).where(*where)
            ).all()
            nothing = {"payload_pack": None, "result_pack": None, "images": None}
            connection.execute(sa.update(t.operations).where(*where).values(nothing))
            emptied = _release(connection, rows)
        return Swept(0, self._store.packs.remove(emptied))

    def _retired_samplers(self) -> Swept:
        column = t.samplers.c
        with self._store.removing() as connection:
            rows = connection.execute(
                sa.select(column.sampler_id, column.weights).where(column.retired)
            ).all()
            freed = [
                {"of": row.sampler_id}
                for row in rows
                if row.sampler_id in self._seen
                and from_json(row.weights).version not in self._unfreed
            ]
            if freed:
                remove = sa.delete(t.samplers).where(column.sampler_id == sa.bindparam("of"))
                connection.execute(remove, freed)
        self._seen.clear()
        self._seen.update(row.sampler_id for row in rows)
        return Swept(len(freed))

    def _old_usage(self) -> Swept:
        """Remove what nobody asks for any more: old usage, and old access to checkpoints."""
        before = self._now - usage.KEPT_S
        with self._store.removing() as connection:
            hours = connection.execute(
                sa.delete(t.usage_hours).where(t.usage_hours.c.hour < before)
            )
            reads = connection.execute(
                sa.delete(t.audit).where(t.audit.c.at < before, t.audit.c.act.in_(ACCESSES))
            )
        return Swept(hours.rowcount + reads.rowcount)

    def _chunks(self, *where: Any, order: Any = OP.number) -> Iterator[Swept]:
        reached: Any = None
        while True:
            size, began = self._size, time.monotonic()
            step, reached, found = self._chunk(
                [*where, *([] if reached is None else [order >= reached])], order
            )
            self._adapt(time.monotonic() - began)
            yield step
            if found < size and step.rows == found:
                return

    def _adapt(self, took_s: float) -> None:
        if took_s > STEP_S:
            self._size = max(SMALLEST, self._size // 2)
        elif took_s < STEP_S / 2:
            self._size = min(LARGEST, self._size + 10)

    def _chunk(self, where: Sequence[Any], order: Any) -> tuple[Swept, Any, int]:
        """Remove some rows with their records and their models' snapshots.

        Returns what was removed, the order of the last row, and the number of rows that were found.
        """
        names = (
            OP.number,
            OP.model_id,
            OP.kind,
            OP.payload_pack,
            OP.result_pack,
            OP.images,
            order.label("reached"),
        )
        with self._store.removing() as connection:
            found = connection.execute(
                sa.select(*names).where(*where).order_by(order).limit(self._size)
            ).all()
            if not found:
                return Swept(), None, 0
            rows = with_few_images(found)
            created = {row.model_id for row in rows if row.kind == self._kinds.creates}
            folders = _forget_models(connection, created) if created else ()
            connection.execute(
                sa.delete(t.operations).where(OP.number.in_([row.number for row in rows]))
            )
            emptied = _release(connection, rows)
        swept = Swept(len(rows), self._store.packs.remove(emptied), folders)
        return swept, rows[-1].reached, len(found)

    def orphans(self, suspects: Sequence[str]) -> Iterator[Swept]:
        """Remove packs of failed writes and of an interrupted process, in steps.

        They may be listed beside writes: each step looks for their rows first.
        """
        for first in range(0, len(suspects), LARGEST):
            some = suspects[first : first + LARGEST]
            # Under the lock of the epoch: packs that a later service writes are not among them.
            with self._store.removing() as connection:
                known = set(
                    connection.execute(
                        sa.select(t.packs.c.name).where(t.packs.c.name.in_(some))
                    ).scalars()
                )
            yield Swept(0, self._store.packs.remove([name for name in some if name not in known]))

    def _ids(self, query: Any) -> list[str]:
        with self._store.engine.connect() as connection:
            return [name for name in connection.execute(query).scalars() if name]


def with_few_images(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the first rows whose images can be counted in a short step, and at least one."""
    total = 0
    for number, row in enumerate(rows):
        total += len((row.images or "").split())
        if total > IMAGES_OF_STEP and number:
            return rows[:number]
    return rows


def _release(connection: sa.Connection, rows: Sequence[Any]) -> list[str]:
    """Count removed rows, and return the packs that no row refers to now."""
    of_images = stored_images.release(connection, [row.images for row in rows])
    named = [name for row in rows for name in (row.payload_pack, row.result_pack)]
    released = Counter(name for name in (*named, *of_images) if name)
    if not released:
        return []
    connection.execute(
        RELEASE, [{"of": name, "released": count} for name, count in released.items()]
    )
    where = (t.packs.c.name.in_(list(released)), t.packs.c.records <= 0)
    emptied = list(connection.execute(sa.select(t.packs.c.name).where(*where)).scalars())
    if emptied:
        connection.execute(sa.delete(t.packs).where(t.packs.c.name.in_(emptied)))
    return emptied


def _forget_models(connection: sa.Connection, models: set[str]) -> tuple[str, ...]:
    """Remove the snapshots of these models and return their folders."""
    of_models = t.snapshots.c.model_id.in_(list(models))
    folders = tuple(connection.execute(sa.select(t.snapshots.c.folder).where(of_models)).scalars())
    connection.execute(sa.delete(t.snapshots).where(of_models))
    connection.execute(sa.delete(t.trimmed).where(t.trimmed.c.model_id.in_(list(models))))
    return folders
