"""Training programs that run as clients of the controller."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from skyrl_actors.config.base import FrozenConfig
from skyrl_actors.config.cluster import ClusterConfig


class ReverseEnv(FrozenConfig):
    """Write a short word backwards. Reward 1 for the exact answer, else 0. Evaluation words are never trained on."""

    type: Literal["reverse"] = "reverse"
    min_letters: int = Field(default=3, ge=1)
    max_letters: int = Field(default=5, le=32)
    eval_prompts: int = Field(default=200, ge=1)

    @model_validator(mode="after")
    def _range(self) -> "ReverseEnv":
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters {self.min_letters} is above max_letters {self.max_letters}")
        return self


class PpoConfig(FrozenConfig):
    """PPO with a learned critic (Schulman et al., 2017), GAE (2016) and a per-token KL penalty to the starting policy."""

    type: Literal["ppo"] = "ppo"
    env: ReverseEnv = ReverseEnv()
    seed: int = 0
    iterations: int = Field(default=40, ge=1)
    stop_at_accuracy: float = Field(default=1.01, description="end early once the held-out greedy accuracy reaches this")
    eval_every: int = Field(default=5, ge=1)
    prompts: int = Field(default=64, ge=1, description="prompts of an iteration")
    samples_per_prompt: int = Field(default=4, ge=1)
    max_tokens: int = Field(default=12, ge=1)
    temperature: float = Field(
        default=1.0, gt=0, le=1.0, description="logprobs are those of temperature 1; keep 1 for on-policy ratios"
    )
    lora_rank: int | None = Field(default=None, description="adapter rank of policy and critic; null = full fine-tune")
    epochs: int = Field(default=2, ge=1)
    minibatches: int = Field(default=4, ge=1)
    policy_lr: float = Field(default=2e-4, gt=0)
    critic_lr: float = Field(default=1e-3, gt=0)
    final_lr_share: float = Field(default=0.1, ge=0, le=1, description="both rates fall linearly to this share of their start")
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = Field(default=1.0, ge=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    kl_coef: float = Field(default=0.01, ge=0)
    clip_low_threshold: float = Field(default=0.8, gt=0, lt=1)
    clip_high_threshold: float = Field(default=1.2, gt=1)
    value_clip: float = Field(default=0.2, gt=0)
    mismatch_warn: float = Field(
        default=0.05, gt=0, description="mean |Δ logprob| of engine and trainer on an iteration's samples beyond which it is said"
    )
    mismatch_stop: float | None = Field(default=None, gt=0, description="the same, beyond which the run ends; none = never")
    critic_warmup: int = Field(default=1, ge=0, description="first iterations in which only the critic learns")


class RunConfig(FrozenConfig):
    name: str = Field(default="ppo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")
    folder: Path = Path("runs")


class JobConfig(FrozenConfig):
    cluster: ClusterConfig
    job: PpoConfig = PpoConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _fits(self) -> "JobConfig":
        if self.cluster.critic is None:
            raise ValueError("ppo needs a critic group: set cluster.critic")
        if self.job.lora_rank is not None and self.job.lora_rank > self.cluster.lora.max_rank:
            raise ValueError(f"job.lora_rank {self.job.lora_rank} is above cluster.lora.max_rank {self.cluster.lora.max_rank}")
        if self.job.lora_rank is None and self.cluster.lora.max_full_models < 1:
            raise ValueError("job.lora_rank null is a full fine-tune: set cluster.lora.max_full_models to 1 or more")
        return self
