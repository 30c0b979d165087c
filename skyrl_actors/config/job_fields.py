"""The keys that all kinds of jobs have."""

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig


class JobFields(FrozenConfig):
    """The keys that all kinds of jobs have: seed, rank of adapters, and AdamW."""

    seed: int = Field(
        default=0,
        ge=0,
        description="seed of prompts, rows, samples and initial adapter weights",
    )
    lora_rank: int | None = Field(
        default=None, ge=1, description="rank of the adapters; null = full fine-tune"
    )
    final_lr_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="learning rates fall linearly to this share of their start value",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    grad_clip_norm: float = Field(
        default=1.0, ge=0, description="largest L2 norm of the gradient; 0 = no clipping"
    )
