"""How the ranks of a group hold a model's weights: a tagged union."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyrl_actors.config.base import FrozenConfig


class ReplicaStrategy(FrozenConfig):
    """The whole model on every rank; gradients are summed over ranks once, in the step."""

    type: Literal["replica"] = "replica"


class DeepSpeedStrategy(FrozenConfig):
    """ZeRO. Under adapters, stages 1 and 2 keep the frozen base whole (it has neither gradients nor moments to shard); stage
    3 shards it."""

    type: Literal["deepspeed"] = "deepspeed"
    stage: Literal[1, 2, 3] = Field(default=1, description="shard moments; and gradients; and weights")
    offload_optimizer: bool = Field(default=False, description="moments and float32 weights in host memory")
    offload_parameters: bool = Field(default=False, description="sharded weights in host memory; stage 3 only")

    @model_validator(mode="after")
    def _can_be_had(self) -> "DeepSpeedStrategy":
        if self.offload_parameters and self.stage != 3:
            raise ValueError(f"strategy deepspeed: offload_parameters needs stage 3, this is stage {self.stage}")
        if find_spec("deepspeed") is None:
            raise ValueError("strategy deepspeed: the package is not installed here; pip install 'skyrl-actors[deepspeed]'")
        return self


class Fsdp2Strategy(FrozenConfig):
    """torch's fully_shard: weights, gradients and moments in rows over the ranks."""

    type: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = Field(
        default=True, description="drop gathered layers after the forward; False: faster, more memory"
    )
    cpu_offload: bool = Field(default=False, description="sharded weights and moments in host memory")


StrategyConfig = Annotated[ReplicaStrategy | DeepSpeedStrategy | Fsdp2Strategy, Field(discriminator="type")]
