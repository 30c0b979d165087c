"""The keys that all kinds of jobs have."""

from typing import Annotated

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig

Decay = Annotated[float, Field(ge=0, lt=1)]
# A type with its own default repeats the field, with the same description.
EPOCHS = "passes over the data; in RL over the samples of an iteration"
EVAL_EVERY = "steps between evaluations; in RL iterations"
LEARNING_RATE = "largest learning rate; in RL that of the policy"


class JobFields(FrozenConfig):
    """The keys that all kinds of jobs have: seed, rank of adapters, passes, and AdamW."""

    seed: int = Field(
        default=0,
        ge=0,
        description="seed of prompts, rows, samples and initial adapter weights",
    )
    lora_rank: int | None = Field(
        default=None, ge=1, description="rank of the adapters; null = full fine-tune"
    )
    epochs: int = Field(default=1, ge=1, description=EPOCHS)
    eval_every: int = Field(default=20, ge=1, description=EVAL_EVERY)
    learning_rate: float = Field(default=2e-4, gt=0, description=LEARNING_RATE)
    final_lr_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="learning rates fall linearly to this share of their start value",
    )
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="decays of the first and the second moment"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    grad_clip_norm: float = Field(
        default=1.0, ge=0, description="largest L2 norm of the gradient; 0 = no clipping"
    )
