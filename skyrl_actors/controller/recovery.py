"""Bringing a model's state back: its newest whole snapshot, then every operation behind it, in order, one more time.

Consumes the journal. Produces state in the ranks, equal to what was lost: each operation is its own batch, and which
rank computes which rows is a pure function of the rows (`groups/sharding.py`), so a replay adds the same numbers in the
same order. Answers that were given stay as they are. Also takes the snapshots, and rebuilds past steps for forks.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_actors.backends.base import Backend
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.tenants import Model, TenantTable
from skyrl_actors.journal.base import Journal
from skyrl_actors.journal.entries import Operation
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages import results as rs
from skyrl_actors.messages.errors import Corrupt, InternalError, NotFound, PartDown, StateLost, Unavailable
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path
from skyrl_actors.messages.turn import Turn

log = logging.getLogger(__name__)
KEPT_TIMES = 1000


@dataclass(slots=True)
class Progress:
    """How far a model is. `lock` is held by whoever touches its state, until the journal knows what was done."""

    position: int  # the last operation that was applied to the state
    step: int = 0
    suspect: bool = False  # an operation failed: the ranks may hold something else than the journal says
    snapshot: int = -1  # the position of the newest snapshot
    operations: int = 0  # applied since
    num_bytes: int = 0  # of their payloads
    oldest: float | None = None  # loop time of the first of them
    writing: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def applied(self, number: int, num_bytes: int, now: float) -> None:
        self.position = number
        self.operations += 1
        self.num_bytes += num_bytes
        self.oldest = now if self.oldest is None else self.oldest

    def snapshot_due(self, config: JournalConfig, now: float) -> bool:
        return self.oldest is not None and (
            self.operations >= config.snapshot_operations
            or self.num_bytes >= config.snapshot_bytes
            or now - self.oldest >= config.snapshot_s
        )


class Recovery:
    def __init__(
        self, config: ClusterConfig, backend: Backend, journal: Journal, tenants: TenantTable, folders: CheckpointFolders,
        disk: Disk,
    ):  # fmt: skip
        self.config = config
        self.backend = backend
        self.journal = journal
        self.tenants = tenants
        self.folders = folders
        self.disk = disk
        self.progress: dict[str, Progress] = {}
        self.recovery_s: list[float] = []  # seconds of the newest restorations
        self.snapshot_s: list[float] = []

    async def restore(self, model: Model, wanted: Collection[str] = ()) -> None:
        """Its lock is held. `wanted`: versions that were lost and are asked for; those of adapters, which are small, come all. Raises
        InternalError when it fails as often as `restart.attempts`, Corrupt when files are gone."""
        started = asyncio.get_running_loop().time()
        spec, progress = model.spec, self.progress[model.spec.model_id]
        attempts = 0
        while True:
            await self.backend.ready(spec.role)
            try:
                lost = [s for s in await self.lost_samplers(spec.model_id) if spec.lora or s.users or s.weights.version in wanted]
                exports = {s.number: s.weights.version for s in lost if s.number is not None}
                replayed = await self._rebuilt(spec, progress.position, exports)
                break
            except (Corrupt, Unavailable):
                raise
            except PartDown as error:
                log.warning("model %s waits: %s", spec.model_id, error)
            except InternalError as error:
                attempts += 1
                log.warning("model %s: failed while it was restored: %s", spec.model_id, error)
                if attempts >= self.config.restart.attempts:
                    raise
        seconds = asyncio.get_running_loop().time() - started
        self.recovery_s = [*self.recovery_s[1 - KEPT_TIMES :], seconds]
        log.info("model %s is back at operation %d (%d replayed, %.2f s)", spec.model_id, progress.position, replayed, seconds)

    async def _rebuilt(self, spec: ModelSpec, position: int, exports: Mapping[int, str]) -> int:
        """A version whose way back is lost does not keep its model from coming back."""
        try:
            return await self._rebuild(spec, spec.model_id, position, exports)
        except (Corrupt, NotFound) as error:
            if not exports:
                raise
            log.error("samplers of %s can not be frozen again: %s", spec.model_id, error)
            return await self._rebuild(spec, spec.model_id, position, {})

    async def keep_samplers(self, model: Model) -> None:
        """Its lock is held, and it is about to go: its lost versions can be computed anew now, and never again."""
        lost = await self.lost_samplers(model.spec.model_id) if model.spec.lora is None else []
        if lost:
            await self.restore(model, [s.weights.version for s in lost])

    async def lost_samplers(self, model_id: str) -> list:
        mine = [s for s in self.tenants.samplers.values() if s.owner == model_id]
        return [s for s in mine if not await self.backend.has_sampler(s.weights)]

    async def _rebuild(self, spec: ModelSpec, source: str, upto: int, exports: Mapping[int, str]) -> int:
        """`source`'s state behind operation `upto`, in the model `spec`; versions named by `exports` are frozen again on
        the way. Returns the number of operations that were run again."""
        start = at = await self._from_snapshot(spec, source, min([upto, *exports]))
        replayed, operations = 0, await self.journal.operations(source, start, max([upto, *exports]))
        trimmed = await self.journal.trimmed(source)  # behind the reading: what is removed is marked before it goes
        only_created = [(op.number, op.kind) for op in operations] == [(upto, "CreateModel")]
        if trimmed and start < trimmed and not only_created:
            raise Corrupt(
                f"operations of {source} up to {trimmed} are older than journal.retention_s and were removed, and no whole snapshot "
                f"covers them: its state behind operation {upto} cannot be computed"
            )
        for operation in operations:
            if operation.effect in ("applied", "dropped") and operation.number <= upto:
                await self._replay(spec, operation, Turn(operation.number, at))
                replayed, at = replayed + 1, operation.number
            if operation.number in exports:
                await self.backend.save_for_sampler(spec, Turn(None, at), exports[operation.number], written=True)
        return replayed

    async def _from_snapshot(self, spec: ModelSpec, source: str, upto: int) -> int:
        """Load the newest whole snapshot up to there; returns its position, or -1 when it must begin at the creation."""
        for snapshot in await self.journal.snapshots(source):
            if snapshot.number > upto:
                continue
            try:
                folder = await self.journal.verified_snapshot(snapshot)
            except Corrupt as error:
                log.error("%s; an older one and a longer replay are used", error)
                continue
            await self.backend.restore(spec, Turn(snapshot.number), str(folder))
            return snapshot.number
        return -1

    async def _replay(self, spec: ModelSpec, operation: Operation, turn: Turn) -> None:
        """Do to the model what this answered operation did to it. The answer stays the one that was given."""
        request = await self.journal.request(operation)
        if operation.effect == "dropped":
            await self.backend.drop_gradients(spec, turn)
        elif isinstance(request, rq.ForwardBackward):
            await self.backend.forward_backward(spec, turn, request.columns, request.loss, False)
        elif isinstance(request, rq.OptimStep):
            await self.backend.optim_step(spec, turn, request.adam)
        elif isinstance(request, rq.LoadWeights):
            path, result = parse_path(request.path), await self.journal.result(operation)
            if request.mixed_with is not None:
                raise Corrupt(f"operation {turn.number} mixed two checkpoints, and the snapshot behind it is lost")
            folder = await self.disk.read(self.folders.existing, path)
            is_same = isinstance(result, rs.Loaded) and await self.disk.read(self.folders.is_version, path, result.version)
            if not is_same:
                raise Corrupt(f"{path} was changed since operation {turn.number} loaded it, and the snapshot behind it is lost")
            await self.backend.load_checkpoint(spec, turn, str(folder), request.with_optimizer)
        elif isinstance(request, rq.CreateModel):
            if request.from_path:
                raise Corrupt(f"the snapshot behind {spec.model_id}'s start from {request.from_path} is lost")
            await self.backend.create_model(spec, Turn(turn.number))

    async def fork(self, spec: ModelSpec, path: str, number: int, with_optimizer: bool) -> None:
        """Fill `spec`'s model with a past step of another one."""
        where = parse_path(path)
        target = await self._step(where)
        await self._rebuild(spec, where.model_id, target.number, {})
        await self.backend.renumber(spec, Turn(number, target.number), with_optimizer)

    async def spec_of_step(self, where: TinkerPath) -> ModelSpec:
        """The model whose past step this is. Raises NotFound for a model or step that the journal does not hold."""
        await self._step(where)
        first = (await self._history(where.model_id))[0]
        request = await self.journal.request(first)
        assert isinstance(request, rq.CreateModel)
        return request.spec

    async def _history(self, model_id: str) -> list[Operation]:
        return [op for op in await self.journal.operations(model_id, 0, 2**62) if op.effect in ("applied", "dropped")]

    async def _step(self, where: TinkerPath) -> Operation:
        history, wanted = await self._history(where.model_id), int(where.name)
        if not history:
            raise NotFound(f"the journal does not hold model {where.model_id!r}")
        if wanted == 0:
            return history[0]
        for operation in history:
            if operation.kind == "OptimStep" and operation.effect == "applied" and operation.step == wanted:
                return operation
        steps = [op.step or 0 for op in history if op.kind == "OptimStep" and op.effect == "applied"]
        first, last = min(steps, default=0), max((op.step or 0 for op in history), default=0)
        older = f"; steps before {first} are older than journal.retention_s" if first > 1 else ""
        raise NotFound(f"{where}: {where.model_id} is at step {last}; use 0 {f'or {first} ' if older else ''}to {last}{older}")

    async def snapshot_if_due(self, model: Model) -> None:
        """Its lock is held. The copy is made now, the files are written while training goes on."""
        progress = self.progress[model.spec.model_id]
        if progress.snapshot_due(self.config.journal, asyncio.get_running_loop().time()) and progress.writing is None:
            await self._begin_snapshot(model.spec, progress)

    async def snapshot_now(self, model: Model) -> None:
        """Its lock is held. For what can not be replayed, because it read files that are not ours. Raises StateLost."""
        progress = self.progress[model.spec.model_id]
        if progress.writing is not None:
            await asyncio.wait([progress.writing])
        handle = await self.backend.copy_state(model.spec, Turn(None, progress.position))
        await self._write_snapshot(model.spec, progress.position, progress.step, handle)
        progress.snapshot = progress.position

    async def _begin_snapshot(self, spec: ModelSpec, progress: Progress) -> None:
        position, step = progress.position, progress.step
        before = replace(progress)
        try:
            handle = await self.backend.copy_state(spec, Turn(None, position))
        except InternalError as error:
            log.warning("no snapshot of %s: %s", spec.model_id, error)
            return
        progress.operations, progress.num_bytes, progress.oldest = 0, 0, None

        async def write() -> None:
            try:
                await self._write_snapshot(spec, position, step, handle)
                progress.snapshot = position
            except InternalError as error:
                log.warning("no snapshot of %s: %s", spec.model_id, error)
                progress.operations += before.operations
                progress.num_bytes += before.num_bytes
            finally:
                progress.writing = None

        progress.writing = asyncio.create_task(write())

    async def _write_snapshot(self, spec: ModelSpec, position: int, step: int, handle: Any) -> None:
        started = asyncio.get_running_loop().time()
        staging = await self.journal.stage_snapshot(spec.model_id, position)
        try:
            await self.backend.write_state(spec, handle, str(staging))
        except InternalError as error:
            await self.journal.drop_staging(staging)
            if isinstance(error, StateLost):
                raise
            raise Unavailable(f"the ranks can not write a snapshot: {error}") from None
        await self.journal.seal_snapshot(staging, spec.model_id, position, step)
        self.snapshot_s = [*self.snapshot_s[1 - KEPT_TIMES :], asyncio.get_running_loop().time() - started]

    async def close(self) -> None:
        writing = [p.writing for p in self.progress.values() if p.writing is not None]
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
