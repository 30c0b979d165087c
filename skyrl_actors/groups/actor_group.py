"""Many training ranks as one: the verbs of a model, spread over ranks and gathered in the caller's order."""

from collections.abc import Sequence
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
from skyrl_actors.groups.sharding import assign_rows
from skyrl_actors.groups.worker_actor import TrainWorkerActor
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.model import AdamParams, LossCall, ModelSpec, Role
from skyrl_actors.messages.results import LossOutput
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.workers.interface import BaseModelInfo, Part, RowOutput, TrainWorker, WorkerSpec


class ActorGroup:
    """`policy` or `critic` ranks. Calls from one caller reach every rank in the same order, which collectives need."""

    def __init__(self, role: Role, config: GroupConfig, actors: list[ActorHandle]):
        self.role: Role = role
        self.config = config
        self.actors = actors
        self.info: BaseModelInfo | None = None

    @property
    def names(self) -> list[str]:
        return [f"{self.role}[{rank}]" for rank in range(len(self.actors))]

    async def start(self) -> BaseModelInfo:
        """Load the base model on every rank and connect the ranks."""
        timeout_s = self.config.call_timeout_s
        (address,) = await remote.gather([self.actors[0].node_address.remote()], self.names[:1], "start", timeout_s)
        port = (await self._call(TrainWorker.rendezvous, [()], actors=self.actors[:1]))[0]
        self.info = (await self.broadcast(TrainWorker.setup, address, port))[0]
        assert self.info is not None
        return self.info

    async def broadcast(self, method: Any, *args: Any) -> list[Any]:
        """The same call on every rank."""
        return await self._call(method, [args] * len(self.actors))

    async def _call(self, method: Any, args: Sequence[tuple[Any, ...]], actors: list[ActorHandle] | None = None) -> list[Any]:
        actors = actors or self.actors
        refs = [actor.call.remote(method.__name__, *share) for actor, share in zip(actors, args, strict=True)]
        return await remote.gather(refs, self.names[: len(refs)], method.__name__, self.config.call_timeout_s)

    async def create_model(self, spec: ModelSpec) -> int:
        return (await self.broadcast(TrainWorker.create_model, spec))[0]

    async def delete_model(self, model_id: str) -> None:
        await self.broadcast(TrainWorker.delete_model, model_id)

    async def forward_backward(self, model_id: str, columns: Columns, loss: LossCall | None, forward_only: bool) -> LossOutput:
        shares = assign_rows(columns.lengths, len(self.actors))
        data = ray.put(columns) if len(self.actors) > 1 else columns
        args = [(rows, model_id, data, loss, forward_only) for rows in shares]
        outputs: list[RowOutput] = await self._call(TrainWorker.forward_backward, args)
        return merge_rows(columns, outputs, loss)

    async def drop_gradients(self, model_id: str) -> None:
        await self.broadcast(TrainWorker.drop_gradients, model_id)

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return (await self.broadcast(TrainWorker.optim_step, model_id, adam))[0]

    async def save_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        await self.broadcast(TrainWorker.save_checkpoint, model_id, folder, with_optimizer)

    async def load_checkpoint(self, model_id: str, folder: str, with_optimizer: bool) -> None:
        await self.broadcast(TrainWorker.load_checkpoint, model_id, folder, with_optimizer)

    async def export_weights(self, model_id: str, path: str, version: str) -> WeightManifest:
        return (await self.broadcast(TrainWorker.export_weights, model_id, path, version))[0]

    def read_files_ref(self, path: str) -> ray.ObjectRef:
        """A reference to files that rank 0 exported, for another actor to fetch."""
        return self.actors[0].call.remote(TrainWorker.read_files.__name__, path)

    async def discard_export(self, path: str) -> None:
        await self._call(TrainWorker.discard_export, [(path,)], actors=self.actors[:1])

    async def move(self, parts: tuple[Part, ...], to: Literal["device", "host"]) -> None:
        await self.broadcast(TrainWorker.move, parts, to)


def merge_rows(columns: Columns, outputs: Sequence[RowOutput], loss: LossCall | None) -> LossOutput:
    """Shares of ranks put back at their rows; sums add up."""
    field = outputs[0].field
    predicted: NDArray[np.float32] = np.zeros(columns.num_tokens, np.float32)
    elementwise: NDArray[np.float32] = np.zeros(columns.num_tokens, np.float32)
    metrics: dict[str, float] = {}
    for output in outputs:
        where = columns.positions(output.rows)
        predicted[where] = output.values
        elementwise[where] = output.elementwise
        for name, value in output.sums.items():
            metrics[name] = metrics.get(name, 0.0) + value
    compute_s = max(output.compute_s for output in outputs)
    metrics |= {"num_tokens:sum": float(columns.num_tokens), "compute_s:sum": compute_s}
    fields = {field: predicted}
    if loss is not None:
        fields["elementwise_loss"] = elementwise
    return LossOutput(columns.offsets, fields, metrics)


def build_group(
    role: Role,
    config: ClusterConfig,
    base_folder: str,
    plan: Plan,
    reserved: PlacementGroup,
    environment: dict[str, str],
) -> ActorGroup:
    """Actors for every rank of a role, in the slots of the plan. They start when `start` is awaited."""
    group_config = config.policy if role == "policy" else config.critic
    if group_config is None:
        raise ConfigError(f"the config has no {role} group")
    share = next(hold[2] for slot in plan.slots_of(role)[:1] for hold in slot.holds if hold[0] == role)
    make: Any = ray.remote  # its type stubs do not know concurrency_groups
    remote_worker = make(concurrency_groups={"watch": 1})(TrainWorkerActor)
    actors = []
    for rank, slot in enumerate(plan.slots_of(role)):
        spec = WorkerSpec(
            role, rank, group_config.num_ranks, base_folder, group_config.dtype, config.placement.device,
            group_config.num_threads, group_config.microbatch_tokens, group_config.collective_timeout_s,
        )  # fmt: skip
        actor_class = remote_worker.options(
            name=f"{config.name}:{role}:{rank}",
            num_cpus=share,
            num_gpus=share if plan.device == "GPU" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=slot.index),
            runtime_env={"env_vars": {**environment, "OMP_NUM_THREADS": str(group_config.num_threads)}},
        )
        actors.append(actor_class.remote(spec))
    return ActorGroup(role, group_config, actors)
