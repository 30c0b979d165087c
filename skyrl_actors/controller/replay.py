"""Restore a model's state from its newest whole snapshot and a replay of later operations.

Consumes the journal. Produces state in the ranks that equals the lost state. Each operation is its
own batch, and which rank computes which rows is a pure function of the rows
(`groups/sharding.py`). So a replay adds the same numbers in the same order. Answers that were
given do not change. This module also takes the snapshots, and rebuilds past steps for forks.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from skyrl_actors.backends.backend import Backend, BackendCopy
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.progress import Progress
from skyrl_actors.controller.tenants import Model, Sampler, TenantTable
from skyrl_actors.controller.verbs import model_verb
from skyrl_actors.controller.verbs.verb import ReplayedOp
from skyrl_actors.journal.entries import Operation
from skyrl_actors.journal.protocol import Journal
from skyrl_actors.messages import requests as rq
from skyrl_actors.messages.errors import (
    Corrupt,
    InternalError,
    NotFound,
    PartDown,
    StateLost,
    Unavailable,
)
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.messages.paths import TinkerPath, parse_path
from skyrl_actors.messages.precondition import OpPrecondition

log = logging.getLogger(__name__)
KEPT_TIMES = 1000  # newest durations that are kept


class Replayer:
    """Restore models, take their snapshots, and rebuild past steps. The caller holds the lock."""

    def __init__(
        self,
        config: ClusterConfig,
        backend: Backend,
        journal: Journal,
        tenants: TenantTable,
        folders: CheckpointFolders,
        disk: Disk,
    ):
        self.config = config
        self.backend = backend
        self.journal = journal
        self.tenants = tenants
        self.folders = folders
        self.disk = disk
        self.progress: dict[str, Progress] = {}
        self.recoveries = 0  # since the controller started
        self.recovery_s: list[float] = []  # seconds of the newest restorations
        self.snapshot_s: list[float] = []

    async def restore(self, model: Model, wanted: Collection[str] = ()) -> None:
        """Restore a model, and the lost versions of its weights that samples need.

        `wanted` names lost versions of a full fine-tune to rebuild beside those with open samples.
        Lost versions of adapters are all rebuilt, because they are small. The caller holds the
        model's lock. Raises InternalError after `restart.attempts` failures, Corrupt when files
        are gone.
        """
        started = asyncio.get_running_loop().time()
        spec, progress = model.spec, self.progress[model.spec.model_id]
        attempts = 0
        while True:
            await self.backend.ready(spec)
            try:
                lost = [
                    s
                    for s in await self.lost_samplers(spec.model_id)
                    if spec.lora or s.users or s.weights.version in wanted
                ]
                exports = {s.number: s.weights.version for s in lost if s.number is not None}
                async with self.backend.holding(spec.base_model):
                    replayed = await self._rebuilt(spec, progress.position, exports)
                break
            except (Corrupt, Unavailable):
                raise
            except PartDown as error:
                log.warning("model %s waits: %s", spec.model_id, error)
            except InternalError as error:
                attempts += 1
                log.warning("model %s was not restored: %s", spec.model_id, error)
                if attempts >= self.config.restart.attempts:
                    raise
        seconds = asyncio.get_running_loop().time() - started
        self.recoveries += 1
        self.recovery_s = [*self.recovery_s[1 - KEPT_TIMES :], seconds]
        log.info(
            "model %s was restored to operation %d (%d replayed, %.2f s)",
            spec.model_id,
            progress.position,
            replayed,
            seconds,
        )

    async def _rebuilt(self, spec: ModelSpec, position: int, exports: Mapping[int, str]) -> int:
        """Rebuild the model with the versions in `exports`, or without them if they are lost."""
        try:
            return await self._rebuild(spec, spec.model_id, position, exports)
        except (Corrupt, NotFound) as error:
            if not exports:
                raise
            log.error("weights of samplers of %s cannot be rebuilt: %s", spec.model_id, error)
            return await self._rebuild(spec, spec.model_id, position, {})

    async def keep_samplers(self, model: Model) -> None:
        """Rebuild lost sampler weights of a model that is about to be unloaded.

        They cannot be computed after the unload. The caller holds the model's lock.
        """
        # Files of adapters are lost together, with the memory of their machine.
        most = 1 if model.spec.lora else None
        if lost := await self.lost_samplers(model.spec.model_id, most):
            await self.restore(model, [s.weights.version for s in lost])

    async def lost_samplers(self, model_id: str, most: int | None = None) -> list[Sampler]:
        """Return the samplers of the model's unnamed versions whose weights are missing.

        `most`: the number of samplers to look at.
        """
        mine = self.tenants.needed_samplers(model_id)[:most]
        return [s for s in mine if not await self.backend.has_sampler(s.weights)]

    async def _rebuild(
        self, spec: ModelSpec, source: str, upto: int, exports: Mapping[int, str]
    ) -> int:
        """Compute `source`'s state after operation `upto` in the model `spec`.

        `exports` maps an operation to the version of sampler weights to write after it. Returns
        the number of replayed operations.
        """
        start = at = await self._from_snapshot(spec, source, min([upto, *exports]))
        replayed, operations = (
            0,
            await self.journal.operations(source, start, max([upto, *exports])),
        )
        # Read after the operations: a sweep marks operations before it removes them.
        trimmed = await self.journal.trimmed(source)
        only_created = [(op.number, op.kind) for op in operations] == [(upto, "CreateModel")]
        if trimmed and start < trimmed and not only_created:
            raise Corrupt(
                f"the state of {source} after operation {upto} cannot be computed: its operations "
                f"up to {trimmed} are older than journal.retention_s and were removed, and no "
                "whole snapshot covers them"
            )
        for operation in operations:
            if operation.effect in ("applied", "dropped") and operation.number <= upto:
                await self._replay(spec, operation, OpPrecondition(operation.number, at))
                replayed, at = replayed + 1, operation.number
            if operation.number in exports:
                await self.backend.save_for_sampler(
                    spec, OpPrecondition(None, at), exports[operation.number], written=True
                )
        return replayed

    async def _from_snapshot(self, spec: ModelSpec, source: str, upto: int) -> int:
        """Load the newest whole snapshot up to operation `upto` and return its position.

        Returns -1 without a snapshot; then the replay begins at the creation.
        """
        for snapshot in await self.journal.snapshots(source):
            if snapshot.number > upto:
                continue
            try:
                folder = await self.journal.verified_snapshot(snapshot)
            except Corrupt as error:
                log.error("%s; an older snapshot and a longer replay are used", error)
                continue
            await self.backend.restore(spec, OpPrecondition(snapshot.number), str(folder))
            return snapshot.number
        return -1

    async def _replay(
        self, spec: ModelSpec, operation: Operation, precondition: OpPrecondition
    ) -> None:
        """Apply an answered operation to the model again. Its recorded answer does not change."""
        if operation.effect == "dropped":
            return await self.backend.drop_gradients(spec, precondition)
        replayed = ReplayedOp(
            spec=spec,
            precondition=precondition,
            operation=operation,
            request=await self.journal.request(operation),
            backend=self.backend,
            folders=self.folders,
            disk=self.disk,
            journal=self.journal,
        )
        await model_verb(operation.kind).replay(replayed)

    async def fork(self, spec: ModelSpec, path: str, number: int, with_optimizer: bool) -> None:
        """Fill `spec`'s model with a past step of another model."""
        where = parse_path(path)
        target = await self._step(where)
        await self._rebuild(spec, where.model_id, target.number, {})
        await self.backend.renumber(spec, OpPrecondition(number, target.number), with_optimizer)

    async def spec_of_step(self, where: TinkerPath) -> ModelSpec:
        """Return the model that a past step belongs to.

        Raises NotFound for a model or step that is not in the journal.
        """
        await self._step(where)
        first = (await self._history(where.model_id))[0]
        request = await self.journal.request(first)
        assert isinstance(request, rq.CreateModel)
        return request.spec

    async def _history(self, model_id: str) -> list[Operation]:
        return [
            op
            for op in await self.journal.operations(model_id, 0, 2**62)
            if op.effect in ("applied", "dropped")
        ]

    async def _step(self, where: TinkerPath) -> Operation:
        history, wanted = await self._history(where.model_id), int(where.name)
        if not history:
            raise NotFound(f"the journal does not hold model {where.model_id!r}")
        if wanted == 0:
            return history[0]
        for operation in history:
            if (
                operation.kind == "OptimStep"
                and operation.effect == "applied"
                and operation.step == wanted
            ):
                return operation
        steps = [
            op.step or 0 for op in history if op.kind == "OptimStep" and op.effect == "applied"
        ]
        first, last = min(steps, default=0), max((op.step or 0 for op in history), default=0)
        older = f"; steps before {first} are older than journal.retention_s" if first > 1 else ""
        raise NotFound(
            f"{where}: {where.model_id} is at step {last}; "
            f"use 0 {f'or {first} ' if older else ''}to {last}{older}"
        )

    async def snapshot_if_due(self, model: Model) -> None:
        """Copy the state if a snapshot is due, and write its files while training continues.

        The caller holds the model's lock.
        """
        progress = self.progress[model.spec.model_id]
        if (
            progress.snapshot_due(self.config.journal, asyncio.get_running_loop().time())
            and progress.writing is None
        ):
            await self._begin_snapshot(model.spec, progress)

    async def copied(self, spec: ModelSpec, position: int) -> BackendCopy:
        """Copy the model's state to host memory. The caller holds the model's lock."""
        return await self.backend.copy_state(spec, OpPrecondition(None, position))

    async def write_copy(self, spec: ModelSpec, position: int, copy: BackendCopy) -> None:
        """Write a snapshot of an operation that cannot be replayed, because it read files.

        The caller holds the model's lock. Raises StateLost or Unavailable.
        """
        progress = self.progress[spec.model_id]
        await self._write_snapshot(spec, position, progress.step, copy)
        progress.snapshot = position

    async def _begin_snapshot(self, spec: ModelSpec, progress: Progress) -> None:
        position, step = progress.position, progress.step
        before = replace(progress)
        try:
            copy = await self.backend.copy_state(spec, OpPrecondition(None, position))
        except InternalError as error:
            log.warning("no snapshot of %s: %s", spec.model_id, error)
            return
        progress.copied(copy.seconds, asyncio.get_running_loop().time())

        async def write() -> None:
            try:
                await self._write_snapshot(spec, position, step, copy)
                progress.snapshot = position
            except InternalError as error:
                log.warning("no snapshot of %s: %s", spec.model_id, error)
                progress.operations += before.operations
                progress.num_bytes += before.num_bytes
            finally:
                progress.writing = None

        progress.writing = asyncio.create_task(write())

    async def _write_snapshot(
        self, spec: ModelSpec, position: int, step: int, copy: BackendCopy
    ) -> None:
        started = asyncio.get_running_loop().time()
        staging = await self.journal.stage_snapshot(spec.model_id, position)
        try:
            await self.backend.write_state(spec, copy, str(staging))
        except InternalError as error:
            await self.journal.drop_staging(staging)
            if isinstance(error, StateLost):
                raise
            raise Unavailable(f"the ranks cannot write a snapshot: {error}") from None
        await self.journal.seal_snapshot(staging, spec.model_id, position, step)
        self.snapshot_s = [
            *self.snapshot_s[1 - KEPT_TIMES :],
            asyncio.get_running_loop().time() - started,
        ]

    async def close(self) -> None:
        writing = [p.writing for p in self.progress.values() if p.writing is not None]
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
