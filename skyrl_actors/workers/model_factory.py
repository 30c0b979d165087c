"""Create a rank's models, frozen base and full fine-tunes, by the configured strategies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from skyrl_actors.config.strategies import (
    DeepSpeedStrategy,
    Fsdp2Strategy,
    ReplicaStrategy,
    StrategyConfig,
)
from skyrl_actors.messages.errors import CollectiveFailed, ConfigError
from skyrl_actors.messages.model import ModelSpec
from skyrl_actors.workers.adapter_proof import prove_adapters
from skyrl_actors.workers.adapter_terms import TOWER
from skyrl_actors.workers.attention import prove_kernels
from skyrl_actors.workers.auto_classes import takes_images
from skyrl_actors.workers.base_files import BaseTensors
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import BaseModelInfo, WorkerSpec
from skyrl_actors.workers.isolation import prove_isolated
from skyrl_actors.workers.models import TrainedModel, lora_tensors, value_head_tensors
from skyrl_actors.workers.network import UNEMBED_WEIGHT, VALUE_BIAS, VALUE_WEIGHT, Network
from skyrl_actors.workers.published_names import Published
from skyrl_actors.workers.rank_groups import ShardGroups, own_group, shard_groups
from skyrl_actors.workers.replay_proof import prove_replay
from skyrl_actors.workers.sequence import SequenceGroup
from skyrl_actors.workers.tensor_files import InMemory, MergedSource
from skyrl_actors.workers.vision_proof import prove_images

T = TypeVar("T")


def info_of(folder: str) -> BaseModelInfo:
    """Read the facts about a base model from its files only."""
    config: Any = AutoConfig.from_pretrained(folder).get_text_config()
    with BaseTensors(Path(folder)) as files:
        size = sum(torch.Size(shape).numel() for shape in files.shapes.values())
    return BaseModelInfo(
        num_parameters=size,
        vocab_size=int(config.vocab_size),
        max_context_tokens=longest_row(config),
        hidden_size=int(config.hidden_size),
    )


def longest_row(config: Any) -> int:
    """Return the largest number of tokens in a row.

    A row beyond a long rope's original length would change the angles of all rows in its pass.
    """
    longest = int(config.max_position_embeddings)
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        longest = min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


class ModelFactory:
    """Create the models of one rank, and load the base model that adapters share."""

    def __init__(self, spec: WorkerSpec, device: torch.device):
        self.spec = spec
        self.device = device
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self._base: Network | None = None
        self._sequence = self._sequence_group()

    @property
    def base(self) -> Network:
        """The frozen base that adapters share. It is loaded on first use."""
        if self._base is None:
            base = self._frozen(self.spec.strategy)
            collective(self.spec, lambda: prove_adapters(base, self.dtype))
            self._base = base
        return self._base

    def _sequence_group(self) -> SequenceGroup | None:
        size = self.spec.sequence_parallel
        if size == 1:
            return None
        starts = range(0, self.spec.world_size, size)
        blocks = tuple(tuple(range(start, start + size)) for start in starts)
        mine = own_group(blocks, self.spec.collective_timeout_s)
        return SequenceGroup(mine, size, self.spec.rank % size)

    def _shard_groups(self, strategy: Fsdp2Strategy) -> ShardGroups:
        shards = strategy.shards_over(self.spec.world_size)
        return shard_groups(shards, self.spec.collective_timeout_s)

    def _ready(self, network: Network, sharded: bool) -> Network:
        network.sequence = self._sequence
        network.same_graph = sharded or self._sequence is not None
        network.score_uncounted = self.spec.score_uncounted
        heads = getattr(network.config, "num_attention_heads", None)
        if not isinstance(heads, int):
            raise ConfigError(
                f"{type(network.module).__name__} cannot be trained here: "
                "it has no attention layers"
            )
        prove_kernels(
            self.device,
            self.dtype,
            int(getattr(network.config, "head_dim", None) or network.hidden_size // heads),
        )
        collective(self.spec, lambda: prove_isolated(network, self.dtype))
        collective(self.spec, lambda: prove_images(network, self.dtype))
        if self.spec.router_replay:
            collective(self.spec, lambda: prove_replay(network))
        return network

    def _check_can_shard(self, strategy: StrategyConfig) -> None:
        """Raise ConfigError for a vision tower under a strategy that shards modules."""
        config = AutoConfig.from_pretrained(self.spec.base_folder)
        if takes_images(config) and not isinstance(strategy, ReplicaStrategy | Fsdp2Strategy):
            raise ConfigError(
                f"{Path(self.spec.base_folder).name} has a vision tower, which strategy "
                f"{strategy.type} cannot compute here; use strategy replica or fsdp2"
            )

    def _frozen(self, strategy: StrategyConfig) -> Network:
        self._check_can_shard(strategy)
        arguments = (self.spec.base_folder, self.dtype, self.device, self.spec.activations)
        if isinstance(strategy, Fsdp2Strategy):
            from skyrl_actors.workers import fsdp2

            return self._ready(
                fsdp2.sharded_network(
                    strategy, self._shard_groups(strategy), *arguments, trained=False
                ),
                sharded=True,
            )
        if isinstance(strategy, DeepSpeedStrategy) and strategy.stage == 3:
            from skyrl_actors.workers import zero

            return self._ready(
                zero.zero_network(strategy, *arguments, trained=False)[0], sharded=True
            )
        return self._ready(BaseModel(*arguments), sharded=False)

    def _whole_base(self) -> BaseModel:
        """Return the base for whole full fine-tunes, even if adapters use a sharded base."""
        if isinstance(self._base, BaseModel):
            return self._base
        if self._base is None and not is_sharded(self.spec.strategy):
            assert isinstance(self.base, BaseModel)
            return self.base
        made = self._ready(
            BaseModel(self.spec.base_folder, self.dtype, self.device, self.spec.activations),
            sharded=False,
        )
        assert isinstance(made, BaseModel)
        return made

    def make(self, spec: ModelSpec) -> TrainedModel:
        """Create a model: an adapter over the base, or a full fine-tune."""
        if spec.lora is not None:
            self.release()
            tensors = lora_tensors(spec.lora, spec.seed, self.base)
            if spec.role == "critic":
                tensors |= value_head_tensors(self.base)
            state = FlatState(
                tensors,
                self.device,
                reduce=self._reduce,
                writes=self.writes,
                optimizer=spec.optimizer,
            )
            return TrainedModel(spec, self.base, state)
        return self._full(spec)

    def _full(self, spec: ModelSpec) -> TrainedModel:
        strategy, is_critic = self.spec.full_strategy, spec.role == "critic"
        self._check_can_shard(strategy)
        arguments = (self.spec.base_folder, self.dtype, self.device, self.spec.activations)
        if isinstance(strategy, Fsdp2Strategy):
            from skyrl_actors.workers import fsdp2

            groups = self._shard_groups(strategy)
            network = self._ready(
                fsdp2.sharded_network(
                    strategy, groups, *arguments, trained=True, is_critic=is_critic
                ),
                sharded=True,
            )
            return TrainedModel(spec, network, fsdp2.Fsdp2State(network, strategy, groups))
        if isinstance(strategy, DeepSpeedStrategy):
            from skyrl_actors.workers import zero

            network, engine = zero.zero_network(
                strategy, *arguments, trained=True, is_critic=is_critic
            )
            made = self._in_full_precision(
                TrainedModel(spec, network, zero.ZeroState(network, engine, strategy))
            )
            # Last: a pass leaves small weights gathered, and each rank would read them whole.
            self._ready(network, sharded=True)
            return made
        base = self._whole_base()
        tensors = {
            name: parameter.data
            for name, parameter in base.own.items()
            if spec.train_tower or not name.startswith(TOWER)
        }
        if is_critic:
            tensors.pop(UNEMBED_WEIGHT, None)  # an untied head is not part of the values
            tensors |= value_head_tensors(base)
        state = FlatState(
            tensors,
            self.device,
            self.dtype,
            self._reduce,
            self.writes,
            spec.optimizer,
            wide=(VALUE_WEIGHT, VALUE_BIAS),
        )
        return self._in_full_precision(TrainedModel(spec, base, state))

    def _in_full_precision(self, model: TrainedModel) -> TrainedModel:
        """Load master weights in the precision of the files, not rounded to the compute dtype."""
        if self.dtype == torch.float32:
            return model
        with BaseTensors(Path(self.spec.base_folder)) as files:
            ours = {
                name: shape
                for name, shape in model.state.shapes.items()
                if name not in (VALUE_WEIGHT, VALUE_BIAS)
            }
            found = Published(files, model.network.stored_form.of_weights(ours), ours)
            if found.shapes == ours:
                zeros = {
                    name: torch.zeros(shape)
                    for name, shape in model.state.shapes.items()
                    if name not in ours
                }
                model.state.load(MergedSource([found, InMemory(zeros)]))
        return model

    @property
    def writes(self) -> bool:
        return self.spec.rank == 0

    def bind(self, model: TrainedModel) -> None:
        """Prepare the network for passes of this model.

        A full fine-tune that is held whole replaces the weights of the base.
        """
        if isinstance(model.network, BaseModel):
            state = model.state if model.spec.lora is None else None
            full = isinstance(state, FlatState)
            model.network.place(state.views if full else model.network.own)

    def release(self) -> None:
        """Restore the base's own weights."""
        if isinstance(self._base, BaseModel):
            self._base.release()

    def in_step(self, model: TrainedModel) -> bool:
        """Return whether all ranks must run the same number of passes."""
        strategy, least = (
            (self.spec.strategy, 3) if model.shares_network else (self.spec.full_strategy, 2)
        )
        return self.spec.world_size > 1 and is_sharded(strategy, least)

    def _reduce(self, gradients: Tensor) -> None:
        if self.spec.world_size > 1:
            collective(self.spec, lambda: dist.all_reduce(gradients))

    def move_base(self, device: torch.device) -> None:
        if isinstance(self._base, BaseModel):
            self._base.move(device)
        elif (
            self._base is not None
            and isinstance(self.spec.strategy, Fsdp2Strategy)
            and self.spec.strategy.offload == "none"
        ):
            cast(Any, self._base).move(device)


def is_sharded(strategy: StrategyConfig, least_stage: int = 3) -> bool:
    """Return whether passes are collective.

    With ZeRO, they are from the stage on that gathers weights or reduces gradients in passes.
    """
    return isinstance(strategy, Fsdp2Strategy) or (
        isinstance(strategy, DeepSpeedStrategy) and strategy.stage >= least_stage
    )


def collective(spec: WorkerSpec, call: Callable[[], T]) -> T:
    """Run a call in which ranks meet. Raises CollectiveFailed when it fails on several ranks.

    A deadline or a dead peer makes the process group unusable. So does an error on one rank,
    because the other ranks wait in the call.
    """
    try:
        return call()
    except RuntimeError as error:
        if spec.world_size == 1:
            raise
        raise CollectiveFailed(f"rank {spec.rank}: {error}") from None
