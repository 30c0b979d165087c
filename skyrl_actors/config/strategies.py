"""How a model's weights are distributed over the ranks of a group: a tagged union."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field, model_validator

from skyrl_actors.config.frozen import FrozenConfig


class ReplicaStrategy(FrozenConfig):
    """Every rank holds the whole model.

    Gradients are summed over the ranks once for each optimizer step.
    """

    type: Literal["replica"] = "replica"


class DeepSpeedStrategy(FrozenConfig):
    """ZeRO.

    The frozen base model under adapters has neither gradients nor optimizer moments. Stages 1 and 2
    therefore keep it whole on every rank. Stage 3 shards it.
    """

    type: Literal["deepspeed"] = "deepspeed"
    stage: Literal[1, 2, 3] = Field(
        default=1, description="1: shard optimizer moments; 2: also gradients; 3: also weights"
    )
    offload_optimizer: bool = Field(
        default=False, description="keep optimizer moments and float32 weights in host memory"
    )
    offload_parameters: bool = Field(
        default=False, description="keep sharded weights in host memory; needs stage 3"
    )

    @model_validator(mode="after")
    def _available(self) -> "DeepSpeedStrategy":
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"strategy deepspeed: offload_parameters needs stage 3, this is stage {self.stage}"
            )
        if find_spec("deepspeed") is None:
            raise ValueError(
                "strategy deepspeed: the package is not installed here; "
                "pip install 'skyrl-actors[deepspeed]'"
            )
        return self


class Fsdp2Strategy(FrozenConfig):
    """PyTorch's fully_shard.

    Weights, gradients and optimizer moments are sharded by rows over the ranks.
    """

    type: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = Field(
        default=True,
        description="free gathered layers after the forward pass; false = faster, "
        "but needs more memory",
    )
    cpu_offload: bool = Field(
        default=False, description="keep sharded weights and optimizer moments in host memory"
    )


StrategyConfig = Annotated[
    ReplicaStrategy | DeepSpeedStrategy | Fsdp2Strategy, Field(discriminator="type")
]
