"""A journal in memory that can lose its last writes, refuse to write, and damage snapshots.

`Disk` contains the state that survives a crash. A `SimJournal` is the journal of one controller on
it.
"""

import asyncio
import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyrl_actors.journal.encoding import decode, encode
from skyrl_actors.journal.entries import (
    Accepted,
    Answered,
    Audited,
    Blob,
    Entry,
    JournalState,
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
from skyrl_actors.journal.usage import totals
from skyrl_actors.messages.errors import Corrupt, Unavailable
from skyrl_actors.messages.keys import AuditEntry, StoredKey
from skyrl_actors.messages.operating import Mode
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Result
from skyrl_actors.messages.usage import OwnerQuota, Usage
from skyrl_actors.messages.weights import SamplerWeights


@dataclass
class Disk:
    """The durable state of journal and checkpoints."""

    epoch: int = 0
    operations: dict[int, Operation] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    sessions: dict[str, SessionOpened] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    samplers: dict[str, SamplerOpened] = field(default_factory=dict)
    retired: list[SamplerWeights] = field(default_factory=list)
    snapshots: dict[tuple[str, int], SnapshotTaken] = field(default_factory=dict)
    files: dict[str, object] = field(default_factory=dict)  # written by ranks, by folder
    keys: dict[str, StoredKey] = field(default_factory=dict)
    audit: list[AuditEntry] = field(default_factory=list)
    quotas: dict[str, OwnerQuota] = field(default_factory=dict)
    mode: Mode = "running"
    usage: list[Usage] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    full: bool = False

    def put(self, entry: Entry) -> None:
        if isinstance(entry, Accepted):
            assert entry.number not in self.operations, "a number was used twice"
            assert all(op.request_id != entry.request_id for op in self.operations.values()), (
                "a request id was used twice"
            )
            blob = self._record(f"p{entry.number}", entry.request)
            self.operations[entry.number] = Operation(
                number=entry.number,
                request_id=entry.request_id,
                kind=type(entry.request).__name__,
                stream=entry.stream,
                seq_id=entry.seq_id,
                digest=entry.digest,
                model_id=entry.model_id,
                session_id=entry.session_id,
                accepted_at=entry.accepted_at,
                payload=blob,
            )
        elif isinstance(entry, Answered):
            before = self.operations[entry.number]
            assert before.answered_at is None, f"operation {entry.number} was answered twice"
            blob = self._record(f"r{entry.number}", entry.result)
            self.operations[entry.number] = replace(
                before,
                answered_at=entry.answered_at,
                effect=entry.effect,
                failed=entry.failed,
                step=entry.step,
                result=blob,
            )
        elif isinstance(entry, SessionOpened):
            assert entry.session_id not in self.sessions
            self.sessions[entry.session_id] = entry
        elif isinstance(entry, SessionEnded):
            self.ended.add(entry.session_id)
        elif isinstance(entry, SamplerOpened):
            self.samplers[entry.sampler_id] = entry
        elif isinstance(entry, SamplerRetired):
            retired = self.samplers.pop(entry.sampler_id, None)
            self.retired += [retired.weights] if retired else []
        elif isinstance(entry, SnapshotTaken):
            self.snapshots[entry.model_id, entry.number] = entry
        elif isinstance(entry, KeyStored):
            self.keys[entry.key.digest] = entry.key
        elif isinstance(entry, Audited):
            self.audit.append(entry.entry)
        elif isinstance(entry, QuotaSet):
            self.quotas[entry.quota.owner] = entry.quota
        elif isinstance(entry, ModeSet):
            self.mode = entry.mode
        elif isinstance(entry, Used):
            self.usage.append(entry.usage)
        elif isinstance(entry, SnapshotDropped):
            self.snapshots.pop((entry.model_id, entry.number), None)

    def _record(self, name: str, message: Request | Result) -> Blob:
        self.records[name] = encode(message)
        return Blob(pack=name, offset=0, length=len(self.records[name]), digest="")


class SimJournal:
    """The journal of one controller, with random delays. A fenced journal must not write."""

    def __init__(self, disk: Disk, chance: random.Random):
        self.disk = disk
        self.chance = chance
        self.trouble: str | None = None
        self.lost: str | None = None
        self.deposed: str | None = None
        self.ended_silent = False
        self.is_silent = False
        self.dead = False
        self._turn = asyncio.Lock()
        self._epoch = 0

    async def _pass_time(self) -> None:
        await asyncio.sleep(self.chance.random() * 0.01)
        if self.dead:
            await asyncio.Event().wait()

    async def open(self, holder: str, wait: bool = False) -> JournalState:
        await self._pass_time()
        disk = self.disk
        disk.epoch += 1
        self._epoch = disk.epoch
        live = [s for s in disk.sessions.values() if s.session_id not in disk.ended]
        names = {s.session_id for s in live}
        owed = [op for op in disk.operations.values() if op.answered_at is None]
        numbers = {op.number for op in owed}
        for key in [key for key in disk.snapshots if key[1] in numbers]:
            del disk.snapshots[key]
        snapshots = {s.model_id: s for s in sorted(disk.snapshots.values(), key=lambda s: s.number)}
        created = [
            op
            for op in disk.operations.values()
            if op.kind == "CreateModel" and op.session_id in names
        ]
        needed = {op.number: op for op in owed}
        for creation in created:
            needed |= {op.number: op for op in self._changes(str(creation.model_id), snapshots)}
        ordered = tuple(needed[number] for number in sorted(needed))
        recent = frozenset(
            op.request_id for op in disk.operations.values() if op.answered_at is not None
        )
        samplers = tuple(sorted(disk.samplers.values(), key=lambda s: s.number or 0))
        return JournalState(
            epoch=disk.epoch,
            next_number=max(disk.operations, default=0) + 1,
            sessions=tuple(live),
            samplers=samplers,
            operations=ordered,
            snapshots=tuple(snapshots.values()),
            keys=tuple(disk.keys.values()),
            quotas=tuple(disk.quotas.values()),
            mode=disk.mode,
            recent=recent,
        )

    def _changes(self, model_id: str, snapshots: dict[str, SnapshotTaken]) -> list[Operation]:
        """Return operations after the newest snapshot or the last step, whichever is older.

        The real journal reads the same ones.
        """
        mine = [
            op
            for op in self.disk.operations.values()
            if op.model_id == model_id and op.answered_at is not None
        ]
        steps = [op.number for op in mine if op.kind == "OptimStep" and op.effect != "none"]
        since = (
            min(max(steps), snapshots[model_id].number if model_id in snapshots else 0)
            if steps
            else 0
        )
        changed = [
            op for op in mine if op.effect != "none" or (op.kind == "ForwardBackward" and op.failed)
        ]
        return [op for op in changed if op.number >= since or op.kind == "CreateModel"]

    async def audit(
        self, last: int, since: float = 0.0, until: float | None = None
    ) -> list[AuditEntry]:
        await self._pass_time()
        found = [one for one in self.disk.audit if since <= one.at < (until or 1e99)]
        return found[-last:]

    async def usage(self, since: float, until: float, owner: str | None = None) -> list[Usage]:
        await self._pass_time()
        return totals(
            one
            for one in self.disk.usage
            if since <= one.hour < until and owner in (None, one.owner)
        )

    async def trimmed(self, model_id: str) -> int:
        await self._pass_time()
        return 0

    async def newest_answered(self, stream: str, before: int, limit: int) -> list[Operation]:
        await self._pass_time()
        mine = [
            op for op in self.disk.operations.values() if op.stream == stream and op.number < before
        ]
        answered = [op for op in mine if op.answered_at is not None and op.seq_id is not None]
        return sorted(answered, key=lambda op: op.number)[-limit:]

    async def write(self, *entries: Entry) -> None:
        async with self._turn:
            await self._pass_time()
            if self.disk.full:
                self.trouble = "no space left on device"
                raise Unavailable(self.trouble)
            assert self._epoch == self.disk.epoch, "a fenced journal wrote"
            self.trouble = None
            for entry in entries:
                self.disk.put(entry)
            await self._pass_time()

    async def request(self, operation: Operation) -> Request:
        await self._pass_time()
        assert operation.payload is not None
        return decode(self.disk.records[operation.payload.pack])

    async def result(self, operation: Operation) -> Result:
        await self._pass_time()
        assert operation.result is not None
        return decode(self.disk.records[operation.result.pack])

    async def find(self, request_id: str) -> Operation | None:
        await self._pass_time()
        return next(
            (op for op in self.disk.operations.values() if op.request_id == request_id), None
        )

    async def operations(self, model_id: str, after: int, upto: int) -> list[Operation]:
        await self._pass_time()
        found = [
            op
            for op in self.disk.operations.values()
            if op.model_id == model_id and after < op.number <= upto
        ]
        return sorted(found, key=lambda op: op.number)

    async def snapshots(self, model_id: str) -> list[SnapshotTaken]:
        await self._pass_time()
        mine = [s for s in self.disk.snapshots.values() if s.model_id == model_id]
        return sorted(mine, key=lambda s: -s.number)

    async def was_unloaded(self, model_id: str) -> bool:
        await self._pass_time()
        return any(
            op.kind == "Unload" and op.model_id == model_id and op.answered_at and not op.failed
            for op in self.disk.operations.values()
        )

    async def retired_weights(self) -> list[SamplerWeights]:
        await self._pass_time()
        return list(self.disk.retired)

    async def stage_snapshot(self, model_id: str, number: int) -> Path:
        await self._pass_time()
        return Path(f"/snapshots/{model_id}@{number}")

    async def drop_staging(self, staging: Path) -> None:
        pass

    async def seal_snapshot(
        self, staging: Path, model_id: str, number: int, step: int
    ) -> SnapshotTaken:
        snapshot = SnapshotTaken(
            model_id=model_id,
            number=number,
            step=step,
            folder=str(staging),
            num_bytes=1,
            taken_at=0.0,
        )
        await self.write(snapshot)
        if self.chance.random() < 0.2:
            self.disk.damaged.add(str(staging))
        return snapshot

    async def verified_snapshot(self, snapshot: SnapshotTaken) -> Path:
        await self._pass_time()
        if snapshot.folder in self.disk.damaged:
            raise Corrupt(f"{snapshot.folder} is damaged")
        return Path(snapshot.folder)

    async def sweep(self, unfreed: Collection[str] = ()) -> int:
        return 0

    async def close(self) -> None:
        pass
