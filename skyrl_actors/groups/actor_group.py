"""A group of training ranks that acts as one worker: it splits calls and merges results."""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.types import Plan
from skyrl_actors import remote
from skyrl_actors.config.cluster import ClusterConfig, GroupConfig
from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.groups.batcher import Batcher, Call
from skyrl_actors.groups.rank_env import rank_environment
from skyrl_actors.groups.sharding import assign_parts
from skyrl_actors.groups.standby import Standby, worker_class
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import ConfigError, InternalError
from skyrl_actors.messages.model import LossCall, Role
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.results import LossOutput
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.workers.interface import (
    TORN,
    BaseModelInfo,
    MemoryPart,
    RankStatus,
    RowOutput,
    TrainWorker,
    WorkerSpec,
)

log = logging.getLogger(__name__)
STATUS_TIMEOUT_S = 10.0


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
        start_timeout_s: float,
    ):
        self.role: Role = role
        self.config = config
        self.actors = actors
        self.epoch = epoch
        self.start_timeout_s = start_timeout_s
        self.info: BaseModelInfo | None = None
        self.pids: list[int] = []
        self.log_files: list[str] = []
        limit = config.microbatch_tokens * max(1, len(actors)) if config.share_passes else 0
        self._gathering: set[asyncio.Task[None]] = set()
        self._batcher = Batcher(self._compute, limit)

    @property
    def names(self) -> list[str]:
        return [f"{self.role}[{rank}]" for rank in range(len(self.actors))]

    async def start(self) -> BaseModelInfo:
        """Load the base model on every rank and connect the ranks."""
        timeout_s = self.start_timeout_s
        self._note(
            await self._gather(
                [actor.adopt.remote(self.epoch) for actor in self.actors], "start", timeout_s
            )
        )
        (address,) = await self._gather([self.actors[0].node_address.remote()], "start", timeout_s)
        port = (await self._call(TrainWorker.rendezvous, [()], actors=self.actors[:1]))[0]
        refs = [
            actor.call.remote(self.epoch, TrainWorker.setup.__name__, address, port)
            for actor in self.actors
        ]
        self.info = (await self._gather(refs, "setup", timeout_s))[0]
        assert self.info is not None
        return self.info

    async def adopt(self, specs: Sequence[WorkerSpec]) -> bool:
        """Attach to running ranks. Return whether all run with the configured specs."""
        refs = [actor.adopt.remote(self.epoch) for actor in self.actors]
        found: list[RankStatus] = await self._gather(refs, "take over", self.config.call_timeout_s)
        self.info = found[0].info
        self._note(found)
        return all(
            status.spec == spec and status.info is not None
            for status, spec in zip(found, specs, strict=True)
        )

    def _note(self, found: Sequence[RankStatus]) -> None:
        self.pids = [status.pid for status in found]
        self.log_files = [status.log_file for status in found]

    async def residents(self) -> dict[str, int]:
        """Return the models that any rank holds, with the last operation that all ranks applied.

        The value is TORN where a state is incomplete or ranks differ.
        """
        found = await self._gather(
            [actor.adopt.remote(self.epoch) for actor in self.actors], "residents"
        )
        held = sorted(set().union(*(status.applied for status in found)))
        numbers = {
            model_id: {status.applied.get(model_id, TORN) for status in found} for model_id in held
        }
        return {model_id: one.pop() if len(one) == 1 else TORN for model_id, one in numbers.items()}

    async def broadcast(self, method: Any, *args: Any) -> list[Any]:
        """Make the same call on every rank."""
        return await self._call(method, [args] * len(self.actors))

    async def _call(
        self, method: Any, args: Sequence[tuple[Any, ...]], actors: list[ActorHandle] | None = None
    ) -> list[Any]:
        actors = actors or self.actors
        refs = [
            a.call.remote(self.epoch, method.__name__, *share)
            for a, share in zip(actors, args, strict=True)
        ]
        return await self._gather(refs, method.__name__)

    async def _gather(
        self, refs: Sequence[ray.ObjectRef], what: str, timeout_s: float | None = None
    ) -> list[Any]:
        return await remote.gather(
            refs, self.names[: len(refs)], what, timeout_s or self.config.call_timeout_s
        )

    async def apply(
        self, model_id: str, precondition: OpPrecondition, method: Any, *args: Any
    ) -> list[Any]:
        """Run a verb of a model on every rank. Each operation is applied exactly once."""
        return await self._apply(model_id, precondition, method, [args] * len(self.actors))

    async def _apply(
        self,
        model_id: str,
        precondition: OpPrecondition,
        method: Any,
        args: Sequence[tuple[Any, ...]],
    ) -> list[Any]:
        calls = zip(self.actors, args, strict=True)
        refs = [
            actor.apply.remote(self.epoch, model_id, precondition, method.__name__, *share)
            for actor, share in calls
        ]
        return await self._gather(refs, method.__name__)

    async def delete_model(self, model_id: str) -> None:
        """Delete a model on every rank."""
        await self._gather(
            [actor.delete.remote(self.epoch, model_id) for actor in self.actors], "delete_model"
        )

    async def forward_backward(
        self,
        model_id: str,
        precondition: OpPrecondition,
        columns: Columns,
        loss: LossCall | None,
        forward_only: bool,
    ) -> LossOutput:
        """Run a forward or forward-backward call.

        Calls that arrive during a computation form the next batch. Small calls of a batch share a
        pass through the network.
        """
        return await self._batcher.run(
            Call(
                model_id=model_id,
                precondition=precondition,
                columns=columns,
                loss=loss,
                forward_only=forward_only,
            )
        )

    async def _compute(self, calls: Sequence[Call]) -> list[LossOutput | BaseException]:
        ranks = len(self.actors) // self.config.sequence_parallel
        hidden_size = self.info.hidden_size if self.info else 0
        shares = assign_parts([call.columns.lengths for call in calls], ranks, hidden_size)
        data = tuple(call.columns for call in calls)
        shared = ray.put(data) if len(self.actors) > 1 else data
        refs = []
        for rank, actor in enumerate(self.actors):
            rows = shares[rank // self.config.sequence_parallel]
            parts = [
                (call.model_id, call.precondition, rows[i], call.loss)
                for i, call in enumerate(calls)
            ]
            refs.append(
                actor.forward_backward.remote(self.epoch, shared, parts, calls[0].forward_only)
            )
        of_ranks: list[list[Any]] = await self._gather(refs, "forward_backward")
        return [
            self._merged(call, [outcomes[i] for outcomes in of_ranks])
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
        return merge_rows(call.columns, outcomes, call.loss)

    async def copy_state(self, model_id: str, precondition: OpPrecondition) -> list[int]:
        """Copy the state of a model on every rank and return one handle per rank."""
        return await self.apply(model_id, precondition, TrainWorker.copy_state, model_id)

    async def write_state(self, handles: Sequence[int], folder: str) -> None:
        """Write the copies with these handles, one per rank, into `folder`."""
        calls = zip(self.actors, handles, strict=True)
        await self._gather(
            [actor.write_state.remote(self.epoch, handle, folder) for actor, handle in calls],
            "write_state",
        )

    async def export_weights(
        self,
        model_id: str,
        precondition: OpPrecondition,
        path: str,
        version: str,
        checksums: bool,
        materialize: Materialize = "eager",
        shards: bool = False,
    ) -> WeightManifest:
        """Export a version of the weights. Rank 0 writes it and returns the manifest."""
        arguments = (model_id, path, version, checksums, materialize, shards)
        return (await self.apply(model_id, precondition, TrainWorker.export_weights, *arguments))[0]

    async def write_versions(self, model_id: str, needless: Sequence[str]) -> list[str]:
        """Write the unwritten live versions, except `needless`, and return those written."""
        return (await self.broadcast(TrainWorker.write_versions, model_id, needless))[0]

    async def open_stream(
        self, manifest: WeightManifest, stream: WeightStream, rank: int = 0, gathers: bool = False
    ) -> WeightStream:
        """Start to send a version from one rank.

        With `gathers`, ranks can hold shards, and all ranks gather them for the sender. Both calls
        are submitted together, so that no other call runs between them.
        """
        request = replace(stream, id=uuid.uuid4().hex)
        opened = self.actors[rank].call.remote(
            self.epoch, TrainWorker.open_stream.__name__, manifest, request
        )
        if gathers:
            name = TrainWorker.feed.__name__
            refs = [
                actor.call.remote(self.epoch, name, manifest.version, request.id)
                for actor in self.actors
            ]
            task = asyncio.create_task(self._gather_shards(refs))
            self._gathering.add(task)
            task.add_done_callback(self._gathering.discard)
        return (await self._gather([opened], "open_stream"))[0]

    async def _gather_shards(self, refs: Sequence[ray.ObjectRef]) -> None:
        try:
            await self._gather(refs, "feed")
        except InternalError as error:
            # The engine detects the failure when its stream ends, the supervisor at the next verb.
            log.warning("weights were not gathered: %s", error)

    async def write_probe(self, path: str, content: str) -> None:
        """Write a small file on rank 0, to test whether engines can read it."""
        await self._call(TrainWorker.write_probe, [(path, content)], actors=self.actors[:1])

    async def exists(self, paths: Sequence[str]) -> bool:
        """Return whether rank 0 still has all these exports."""
        first = self.actors[:1]
        return all(
            [(await self._call(TrainWorker.exists, [(path,)], actors=first))[0] for path in paths]
        )

    def read_files_ref(self, path: str) -> ray.ObjectRef[Any]:
        """Return a reference to files that rank 0 exported, which another actor can fetch."""
        return self.actors[0].call.remote(self.epoch, TrainWorker.read_files.__name__, path)

    async def discard_export(self, path: str) -> None:
        """Delete an exported version on every rank."""
        await self.broadcast(TrainWorker.discard_export, path)

    async def move(self, parts: tuple[MemoryPart, ...], to: Literal["device", "host"]) -> int:
        """Move parts of all models between device and host. Return the bytes moved by all ranks."""
        return sum(await self.broadcast(TrainWorker.move, parts, to))

    async def resident_bytes(self) -> list[int]:
        """Return the host memory of each rank in bytes."""
        return await self._gather(
            [actor.rss_bytes.remote() for actor in self.actors], "status", STATUS_TIMEOUT_S
        )


def merge_rows(columns: Columns, outputs: Sequence[RowOutput], loss: LossCall | None) -> LossOutput:
    """Merge the rows of all ranks in the order of `columns`, and add up their sums."""
    field = outputs[0].field
    predicted: NDArray[np.float32] = np.zeros(columns.shape, np.float32)
    elementwise: NDArray[np.float32] = np.zeros(columns.shape, np.float32)
    metrics: dict[str, float] = {}
    for output in outputs:
        where = columns.positions(output.rows)
        predicted[where] = output.values
        elementwise[where] = output.elementwise
        for name, value in output.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value
    metrics |= {
        name: value / columns.num_rows for name, value in metrics.items() if name.endswith(":mean")
    }
    compute_s = max(output.compute_s for output in outputs)
    metrics |= {"num_tokens:sum": float(columns.num_tokens), "compute_s:sum": compute_s}
    fields = {field: predicted}
    if loss is not None:
        fields["elementwise_loss"] = elementwise
    return LossOutput(
        offsets=columns.offsets, fields=fields, metrics=metrics, widths=columns.widths
    )


class GroupBuilder:
    """Create the actors of a role in the slots of the plan, always under the same names."""

    def __init__(
        self,
        role: Role,
        config: ClusterConfig,
        base_folder: str,
        plan: Plan,
        reserved: PlacementGroup,
        environment: dict[str, str],
        epoch: int,
        detached: bool,
        standby: Standby | None = None,
    ):
        group_config = config.policy if role == "policy" else config.critic
        if group_config is None:
            raise ConfigError(f"the config has no {role} group")
        self.role: Role = role
        self.config = group_config
        self.epoch = epoch
        self.slots = plan.slots_of(role)
        self.names = [f"{config.name}:{role}:{rank}" for rank in range(len(self.slots))]
        full_strategy = (
            group_config.full_strategy_on(config.placement.device)
            if config.lora.max_full_models
            else ReplicaStrategy()
        )
        self.specs = [
            WorkerSpec(
                role=role,
                rank=rank,
                world_size=group_config.num_ranks,
                base_folder=base_folder,
                dtype=group_config.dtype,
                device=config.placement.device,
                num_threads=group_config.num_threads,
                microbatch_tokens=group_config.microbatch_tokens,
                collective_timeout_s=group_config.collective_timeout_s,
                strategy=group_config.strategy,
                full_strategy=full_strategy,
                activations=group_config.activations,
                sequence_parallel=group_config.sequence_parallel,
                score_uncounted=group_config.score_uncounted,
                preload=group_config.preload,
                export_dtype=config.engine.dtype,
                max_adapters=config.lora.max_adapters,
            )
            for rank in range(len(self.slots))
        ]
        self._share = next(
            hold[2] for slot in self.slots[:1] for hold in slot.holds if hold[0] == role
        )
        self._standby = standby
        self._on_gpu = plan.device == "GPU"
        # A detached actor outlives its controller, and the next controller attaches to it.
        self._lifetime = {"lifetime": "detached"} if detached else {}
        self._reserved = reserved
        self._environment = environment | rank_environment(config, group_config)
        self._start_timeout_s = config.restart.start_timeout_s

    def running(self) -> ActorGroup | None:
        """Return the ranks of an earlier controller if all of them exist."""
        promoted = {
            status.spec: actor for actor, status in (self._standby.strays if self._standby else ())
        }
        actors = [
            promoted.get(spec) or remote.named(name)
            for name, spec in zip(self.names, self.specs, strict=True)
        ]
        return self._group([actor for actor in actors if actor]) if all(actors) else None

    def make(self) -> ActorGroup:
        """Create the actor of every rank, from standby processes where possible.

        The ranks start when `start` is awaited. Raises InternalError while a name is in use.
        """
        actors = []
        for name, slot, spec in zip(self.names, self.slots, self.specs, strict=True):
            actor = self._standby.take(slot.index) if self._standby else None
            if actor is not None:
                actor.become.remote(spec)
            else:
                actor = self._new(name, slot.index, spec)
            actors.append(actor)
        return self._group(actors)

    def _new(self, name: str, bundle: int, spec: WorkerSpec) -> ActorHandle:
        actor_class = worker_class().options(
            name=name,
            namespace=remote.NAMESPACE,
            num_cpus=self._share,
            num_gpus=self._share if self._on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._reserved, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": self._environment},
            **self._lifetime,
        )
        return remote.make_named(actor_class, spec)

    def _group(self, actors: list[ActorHandle]) -> ActorGroup:
        return ActorGroup(self.role, self.config, actors, self.epoch, self._start_timeout_s)

    async def remove(self, group: ActorGroup | None) -> None:
        """End the ranks of this role and wait until their names are free.

        This includes ranks that an earlier controller created.
        """
        for actor in group.actors if group else ():
            ray.kill(actor)
        if self._standby is not None:
            for actor, status in self._standby.strays:
                if status.spec is not None and status.spec.role == self.role:
                    ray.kill(actor)
            self._standby.strays = [
                s
                for s in self._standby.strays
                if s[1].spec is not None and s[1].spec.role != self.role
            ]
        await remote.end_named(self.names)
