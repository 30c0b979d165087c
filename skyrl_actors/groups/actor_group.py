"""A group of training ranks that acts as one worker: it splits calls and merges results."""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.groups.batcher import Batcher, Call
from skyrl_actors.groups.fan_out import FanOut, RankCall, Submitted
from skyrl_actors.groups.merging import merge_rows
from skyrl_actors.groups.sharding import assign_parts
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.model import LossCall, Role
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.results import LossOutput
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.workers.interface import (
    TORN,
    BaseModelInfo,
    CopiedState,
    MemoryPart,
    RankStatus,
    RankUsage,
    TrainWorker,
    WorkerSpec,
)

log = logging.getLogger(__name__)
STATUS_TIMEOUT_S = 10.0


def names_of(role: Role, ranks: int) -> list[str]:
    """Return the names of the ranks of a role, for errors and logs."""
    return [f"{role}[{rank}]" for rank in range(ranks)]


class ActorGroup:
    """Training ranks of the role `policy` or `critic`.

    All ranks receive the calls of one caller in the same order. Collectives need this order.
    """

    def __init__(
        self,
        role: Role,
        config: GroupConfig,
        actors: list[ActorHandle[Any]],
        epoch: int,
        restart: RestartConfig,
        fan_out: FanOut,
    ):
        self.role: Role = role
        self.config = config
        self.actors = actors
        self.epoch = epoch
        self.restart = restart
        self.info: BaseModelInfo | None = None
        self.pids: list[int] = []
        self.log_files: list[str] = []
        limit = config.microbatch_tokens * max(1, len(actors)) if config.share_passes else 0
        self.fan_out = fan_out
        self._gathering: set[asyncio.Task[None]] = set()
        self._batcher = Batcher(self._compute, limit)

    @property
    def names(self) -> list[str]:
        return names_of(self.role, len(self.actors))

    async def start(self) -> BaseModelInfo:
        """Load the base model on every rank and connect the ranks."""
        timeout_s = self.restart.start_timeout_s
        self._note(await self._ask("adopt", "start", timeout_s=timeout_s))
        (address,) = await remote.gather(
            [self.actors[0].node_address.remote()], self.names[:1], "start", timeout_s
        )
        (port,) = await self._call(TrainWorker.rendezvous, ranks=[0])
        setup = TrainWorker.setup.__name__
        found = await self._ask("call", "setup", setup, address, port, timeout_s=timeout_s)
        self.info = found[0]
        assert self.info is not None
        return self.info

    async def adopt(self, specs: Sequence[WorkerSpec]) -> bool:
        """Attach to running ranks. Return whether all run with the configured specs."""
        found: list[RankStatus] = await self._ask("adopt", "take over")
        self.info = found[0].info
        self._note(found)
        return all(
            status.is_of_this_version
            and remote.is_same(status.spec, spec)
            and status.info is not None
            for status, spec in zip(found, specs, strict=True)
        )

    def _note(self, found: Sequence[RankStatus]) -> None:
        self.pids = [status.pid for status in found]
        self.log_files = [status.log_file for status in found]

    async def residents(self) -> dict[str, int]:
        """Return the models that any rank holds, with the last operation that all ranks applied.

        The value is TORN where a state is incomplete or ranks differ.
        """
        found: list[RankStatus] = await self._ask("adopt", "residents")
        held = sorted(set[str]().union(*(status.applied for status in found)))
        numbers = {
            model_id: {status.applied.get(model_id, TORN) for status in found} for model_id in held
        }
        return {model_id: one.pop() if len(one) == 1 else TORN for model_id, one in numbers.items()}

    def _submit(
        self,
        actor_method: str,
        *common: Any,
        own: Sequence[tuple[Any, ...]] | None = None,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        merges: bool = False,
    ) -> Submitted:
        """Start a call of an actor's method on all ranks, or on `ranks`."""
        call = RankCall(
            method=actor_method,
            ranks=range(len(self.actors)) if ranks is None else ranks,
            common=(self.epoch, *common),
            own=own,
            timeout_s=timeout_s or self.restart.call_timeout_s,
            merges=merges,
        )
        return self.fan_out.submit(call)

    async def _ask(self, actor_method: str, what: str, *common: Any, **options: Any) -> list[Any]:
        return await self.fan_out.results(self._submit(actor_method, *common, **options), what)

    async def _call(self, method: Any, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        name = method.__name__
        return await self._ask("call", name, name, *args, ranks=ranks)

    async def broadcast(self, method: Any, *args: Any) -> list[Any]:
        """Make the same call on every rank."""
        return await self._call(method, *args)

    async def apply(
        self, model_id: str, precondition: OpPrecondition, method: Any, *args: Any
    ) -> list[Any]:
        """Run a verb of a model on every rank. Each operation is applied exactly once."""
        name = method.__name__
        return await self._ask("apply", name, model_id, precondition, name, *args)

    async def delete_model(self, model_id: str) -> None:
        """Delete a model on every rank."""
        await self._ask("delete", "delete_model", model_id)

    async def forward_backward(
        self,
        model_id: str,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
        weight: float = 1.0,
    ) -> LossOutput:
        """Run a forward or forward-backward call.

        Calls that arrive during a computation form the next batch. Small calls of a batch share a
        pass through the network. `weight` is that of the model's tenant.
        """
        return await self._batcher.run(
            Call(
                model_id=model_id,
                precondition=precondition,
                columns=columns,
                loss=loss,
                forward_only=forward_only,
                weight=weight,
            )
        )

    async def _compute(self, calls: Sequence[Call]) -> list[LossOutput | BaseException]:
        width = self.config.ranks_of_rows
        ranks = len(self.actors) // width
        hidden_size = self.info.hidden_size if self.info else 0
        shares = assign_parts([call.columns.lengths for call in calls], ranks, hidden_size)
        data = tuple(call.columns for call in calls)
        shared = remote.typed_ray.put(data) if len(self.actors) > 1 else data
        parts = [(call.model_id, call.precondition, call.loss) for call in calls]
        of_ranks: list[list[Any] | None] = await self._ask(
            "forward_backward",
            "forward_backward",
            shared,
            calls[0].forward_only,
            parts,
            own=[(shares[rank // width],) for rank in range(len(self.actors))],
            merges=True,
        )
        return [
            self._merged(call, [outcomes and outcomes[i] for outcomes in of_ranks])
            for i, call in enumerate(calls)
        ]

    def _merged(self, call: Call, outcomes: Sequence[Any]) -> LossOutput | BaseException:
        errors: dict[str, BaseException | None] = {
            name: o
            for name, o in zip(self.names, outcomes, strict=True)
            if isinstance(o, BaseException)
        }
        if errors:
            return remote.merged(errors, "forward_backward")
        return merge_rows(call.columns, [o for o in outcomes if o is not None], call.loss)

    async def copy_state(self, model_id: str, precondition: OpPrecondition) -> list[CopiedState]:
        """Copy the state of a model on every rank."""
        return await self.apply(model_id, precondition, TrainWorker.copy_state, model_id)

    async def write_state(self, copies: Sequence[CopiedState], folder: str) -> None:
        """Write these copies, one per rank, into `folder`."""
        handles = [(copy.handle,) for copy in copies]
        await self._ask("write_state", "write_state", folder, own=handles)

    async def export_weights(
        self,
        model_id: str,
        precondition: OpPrecondition,
        path: str,
        version: str,
        checksums: bool,
        materialize: Materialize = "eager",
    ) -> WeightManifest:
        """Export a version of the weights. Rank 0 writes it and returns the manifest."""
        arguments = (model_id, path, version, checksums, materialize)
        return (await self.apply(model_id, precondition, TrainWorker.export_weights, *arguments))[0]

    async def write_versions(self, model_id: str, needless: Sequence[str]) -> list[str]:
        """Write the unwritten live versions, except `needless`, and return those written."""
        return (await self.broadcast(TrainWorker.write_versions, model_id, needless))[0]

    async def open_streams(
        self,
        manifest: WeightManifest,
        streams: Sequence[tuple[int, WeightStream]],
        gathers: bool,
    ) -> list[WeightStream]:
        """Start to send a version in these streams, each from the rank before it.

        With `gathers`, ranks can hold shards, and all ranks gather them once for the senders. All
        calls are submitted together, so that no other call runs between them.
        """
        asked = [(rank, replace(stream, id=uuid.uuid4().hex)) for rank, stream in streams]
        method = TrainWorker.open_stream.__name__
        opened = [
            self._submit("call", method, manifest, stream, ranks=[rank]) for rank, stream in asked
        ]
        if gathers:
            everywhere = any(rank for rank, _ in asked)
            ids = tuple(stream.id for _, stream in asked)
            fed = self._submit("call", TrainWorker.feed.__name__, manifest.version, ids, everywhere)
            task = asyncio.create_task(self._gather_shards(fed))
            self._gathering.add(task)
            task.add_done_callback(self._gathering.discard)
        found = [self.fan_out.results(each, "open_stream") for each in opened]
        return [streams[0] for streams in await asyncio.gather(*found)]

    async def _gather_shards(self, fed: Submitted) -> None:
        try:
            await self.fan_out.results(fed, "feed")
        except InternalError as error:
            # The engine detects the failure when its stream ends, the supervisor at the next verb.
            log.warning("weights were not gathered: %s", error)

    async def write_probe(self, path: str, content: str) -> None:
        """Write a small file on rank 0, to test whether engines can read it."""
        await self._call(TrainWorker.write_probe, path, content, ranks=[0])

    async def exists(self, paths: Sequence[str]) -> bool:
        """Return whether rank 0 still has all these exports."""
        return all([(await self._call(TrainWorker.exists, p, ranks=[0]))[0] for p in paths])

    def read_files_ref(self, path: str) -> ray.ObjectRef[Any]:
        """Return a reference to files that rank 0 exported, which another actor can fetch."""
        return self.actors[0].call.remote(self.epoch, TrainWorker.read_files.__name__, path)

    async def discard_export(self, path: str) -> None:
        """Delete an exported version on every rank."""
        await self.broadcast(TrainWorker.discard_export, path)

    async def move(self, parts: tuple[MemoryPart, ...], to: Literal["device", "host"]) -> int:
        """Move parts of all models between device and host. Return the bytes moved by all ranks."""
        return sum(await self.broadcast(TrainWorker.move, parts, to))

    async def usage(self) -> list[RankUsage]:
        """Return the host memory of each rank, and the code that it computes with."""
        refs = [actor.usage.remote() for actor in self.actors]
        return await remote.gather(refs, self.names, "status", STATUS_TIMEOUT_S)
