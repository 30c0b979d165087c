"""How a model's weights are distributed over the ranks of a group: a tagged union."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from skyrl_actors.config.frozen import FrozenConfig


class ReplicaStrategy(FrozenConfig):
    """Every rank holds the whole model.

    Gradients are summed over the ranks once for each optimizer step.
    """

    type: Literal["replica"] = "replica"


class ShardingStrategy(FrozenConfig):
    """The key that all strategies share which shard a model."""

    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="what is kept in host memory. optimizer: optimizer moments and float32 "
        "weights, for deepspeed; all: also sharded weights, for fsdp2 and for deepspeed stage 3",
    )


class DeepSpeedStrategy(ShardingStrategy):
    """ZeRO.

    The frozen base model under adapters has neither gradients nor optimizer moments. Stages 1 and 2
    therefore keep it whole on every rank. Stage 3 shards it.
    """

    type: Literal["deepspeed"] = "deepspeed"
    stage: Literal[1, 2, 3] = Field(
        default=1, description="1: shard optimizer moments; 2: also gradients; 3: also weights"
    )

    @model_validator(mode="after")
    def _available(self) -> "DeepSpeedStrategy":
        if self.offload == "all" and self.stage != 3:
            raise ValueError(
                f"strategy deepspeed: offload all needs stage 3, and stage is {self.stage}; "
                "use offload optimizer"
            )
        if find_spec("deepspeed") is None:
            raise ValueError(
                "strategy deepspeed: the package is not installed here; "
                "pip install 'skyrl-actors[deepspeed]'"
            )
        return self


class Fsdp2Strategy(ShardingStrategy):
    """PyTorch's fully_shard.

    Weights, gradients and optimizer moments are sharded by rows over the ranks. With `shard_ranks`,
    several copies exist (HSDP). Passes communicate within a copy. Gradients are summed over the
    copies once for each optimizer step.
    """

    type: Literal["fsdp2"] = "fsdp2"
    shard_ranks: int | None = Field(
        default=None,
        ge=1,
        description="number of consecutive ranks that share one copy of the weights, for example "
        "the GPUs of a node; null = all ranks of the group",
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="data type in which gradients are sent between ranks; bfloat16 = half the "
        "bytes, and sums that are rounded",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="free gathered layers after the forward pass; false = faster, "
        "but needs more memory",
    )

    def shards_over(self, num_ranks: int) -> int:
        """Return the number of ranks that share one copy."""
        return self.shard_ranks or num_ranks

    @model_validator(mode="after")
    def _together(self) -> "Fsdp2Strategy":
        if self.offload == "optimizer":
            raise ValueError(
                "strategy fsdp2 offloads weights and optimizer moments together; use offload all"
            )
        return self


class JaxStrategy(FrozenConfig):
    """JAX: passes are compiled programs, for TPUs, GPUs and CPUs.

    `fsdp` · `tensor` consecutive ranks are a mesh, which holds one copy of the weights. They get
    the same rows. With more ranks, there are several copies, and gradients are summed over them
    once for each optimizer step.
    """

    type: Literal["jax"] = "jax"
    fsdp: int = Field(
        default=1,
        ge=1,
        description="ranks of a mesh that divide the tokens of a pass and one axis of each weight",
    )
    tensor: int = Field(
        default=1, ge=1, description="ranks of a mesh that divide the other axis of each weight"
    )
    cache: Path | None = Field(
        default=None,
        description="folder of compiled programs, which later starts read; null = "
        "`~/.cache/skyrl-actors/jax`, or below XDG_CACHE_HOME. Only its owner may write to it, "
        "because its content is run",
    )

    prepare_s: float = Field(
        default=120.0,
        ge=0,
        description="longest time that a rank of a service takes at its start to compile the "
        "programs of usual calls, or to read them from the cache; others are compiled when a call "
        "needs them. 0 = none ahead, as in jobs",
    )

    @property
    def mesh(self) -> tuple[int, int]:
        return self.fsdp, self.tensor

    @property
    def mesh_ranks(self) -> int:
        """The number of ranks that share one copy of the weights."""
        return self.fsdp * self.tensor

    @field_validator("cache")
    @classmethod
    def _absolute(cls, folder: Path | None) -> Path | None:
        return folder and folder.expanduser().absolute()  # the same in every process

    @model_validator(mode="after")
    def _available(self) -> "JaxStrategy":
        if find_spec("jax") is None:
            raise ValueError(
                "strategy jax: the package is not installed here; pip install 'skyrl-actors[jax]'"
            )
        return self


StrategyConfig = Annotated[
    ReplicaStrategy | DeepSpeedStrategy | Fsdp2Strategy | JaxStrategy, Field(discriminator="type")
]


def mesh_ranks(strategy: StrategyConfig) -> int:
    """Return the number of ranks of a JAX mesh; 1 for other strategies."""
    return strategy.mesh_ranks if isinstance(strategy, JaxStrategy) else 1
