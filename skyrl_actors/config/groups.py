"""The config of a group of training ranks."""

from typing import Literal

from pydantic import Field, model_validator

from skyrl_actors.config.frozen import FrozenConfig
from skyrl_actors.config.strategies import (
    DeepSpeedStrategy,
    Fsdp2Strategy,
    JaxStrategy,
    ReplicaStrategy,
    StrategyConfig,
    mesh_ranks,
)


class GroupConfig(FrozenConfig):
    """A group of training ranks, one for each slot."""

    num_ranks: int = Field(
        default=1, ge=1, description="number of training processes, one on each device"
    )
    strategy: StrategyConfig = Field(
        default=ReplicaStrategy(),
        description="how the frozen base model under adapters is distributed over ranks",
    )
    full_strategy: StrategyConfig | None = Field(
        default=None,
        description="how a full fine-tune is distributed over ranks; null = ZeRO stage 1 on "
        "several GPUs, otherwise replica",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="data type of computation"
    )
    microbatch_tokens: int = Field(
        default=4096,
        ge=1,
        description="tokens of one packed pass; a longer row gets a separate pass",
    )
    share_passes: bool = Field(
        default=True,
        description="compute waiting calls of several tenants in one pass; "
        "false = compute each call alone, so that a replay after a fault is bitwise equal instead "
        "of equal up to rounding",
    )
    activations: Literal["keep", "recompute", "offload"] = Field(
        default="keep",
        description="activations between forward and backward. keep: stay on the device; "
        "recompute: computed again layer by layer; offload: moved to host memory, while weights "
        "stay on the device",
    )
    sequence_parallel: int = Field(
        default=1,
        ge=1,
        description="number of ranks that share the tokens of a pass; for long rows",
    )
    score_uncounted: bool = Field(
        default=True,
        description="return logprobs also where the weight is 0; false = return 0 there, "
        "which saves the cost of the output layer",
    )
    train_tower: bool = Field(
        default=False,
        description="also train the vision tower in full fine-tunes; adapters never change it",
    )
    num_threads: int = Field(default=1, ge=1, description="OpenMP threads of a rank on a CPU")

    @model_validator(mode="after")
    def _can_be_held(self) -> "GroupConfig":
        if self.num_ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel {self.sequence_parallel} does not divide num_ranks "
                f"{self.num_ranks}"
            )
        for strategy in (self.strategy, self.full_strategy):
            if isinstance(strategy, Fsdp2Strategy) and self.num_ranks % (strategy.shard_ranks or 1):
                raise ValueError(
                    f"strategy fsdp2: shard_ranks {strategy.shard_ranks} does not divide num_ranks "
                    f"{self.num_ranks}"
                )
        if isinstance(self.strategy, Fsdp2Strategy) and self.strategy.gradient_dtype != "float32":
            raise ValueError(
                f"strategy.gradient_dtype {self.strategy.gradient_dtype} has no effect: the frozen "
                "base model has no gradients; set full_strategy.gradient_dtype"
            )
        zero = [s for s in (self.strategy, self.full_strategy) if isinstance(s, DeepSpeedStrategy)]
        if self.sequence_parallel > 1 and zero:
            raise ValueError(
                "sequence_parallel is not available with strategy deepspeed; use replica or fsdp2"
            )
        self._check_jax()
        return self

    def _check_jax(self) -> None:
        of_adapters, of_full = (isinstance(s, JaxStrategy) for s in self._strategies)
        if self.full_strategy is not None and of_adapters != of_full:
            raise ValueError(
                "strategy and full_strategy are both jax or neither is: a rank computes with one "
                "library"
            )
        if not of_adapters:
            return
        if self.sequence_parallel > 1:
            raise ValueError(
                "sequence_parallel is not available with strategy jax; use replica or fsdp2"
            )
        meshes = {s.mesh for s in self._strategies if isinstance(s, JaxStrategy)}
        if len(meshes) > 1:
            raise ValueError(
                "fsdp and tensor differ between strategy and full_strategy; a rank is in one mesh"
            )
        if self.num_ranks % self.ranks_of_rows:
            fsdp, tensor = meshes.pop()
            raise ValueError(
                f"strategy jax: fsdp {fsdp} times tensor {tensor} does not divide num_ranks "
                f"{self.num_ranks}"
            )
        if self.activations == "offload":
            raise ValueError(
                "activations offload is not available with strategy jax; use keep or recompute"
            )

    @property
    def ranks_of_rows(self) -> int:
        """The number of consecutive ranks that get the same rows."""
        return self.sequence_parallel * mesh_ranks(self.strategy)

    @property
    def _strategies(self) -> tuple[StrategyConfig, StrategyConfig | None]:
        return self.strategy, self.full_strategy

    def full_strategy_on(self, device: str) -> StrategyConfig:
        """Return the strategy of full fine-tunes, with the default for this device."""
        if self.full_strategy is not None:
            return self.full_strategy
        if isinstance(self.strategy, JaxStrategy):
            return self.strategy
        many_gpus = device == "gpu" and self.num_ranks > 1 and self.sequence_parallel == 1
        return DeepSpeedStrategy() if many_gpus else ReplicaStrategy()
