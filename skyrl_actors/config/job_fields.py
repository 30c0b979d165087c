"""The keys that all kinds of jobs have."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from skyrl_actors.config.frozen import FrozenConfig

LAYERS = ("train_attn", "train_mlp", "train_unembed")
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
    train_attn: bool = Field(default=True, description="adapters have the attention layers")
    train_mlp: bool = Field(default=True, description="adapters have the MLP layers and experts")
    train_unembed: bool | None = Field(
        default=None,
        description="adapters have the output layer; null = where engines can sample with it",
    )
    init_from: str | None = Field(
        default=None,
        description="checkpoint whose weights the trained model begins with: the folder of a run "
        "(its last weights) or of a checkpoint, or a tinker:// path in cluster.checkpoint_dir. Its "
        "rank must be lora_rank, and its layers those of train_attn, train_mlp and train_unembed. "
        "null = the base model",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="values for variables of the base model's chat template, such as "
        "{enable_thinking: false}",
    )
    epochs: int = Field(default=1, ge=1, description=EPOCHS)
    eval_every: int = Field(default=20, ge=1, description=EVAL_EVERY)
    learning_rate: float = Field(default=2e-4, gt=0, description=LEARNING_RATE)
    lr_schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear",
        description="how learning rates fall after warmup_steps: on a line, on half a cosine, or "
        "not at all",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="steps in which learning rates rise linearly from 0; in RL iterations",
    )
    final_lr_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="learning rates fall to this share of their start value",
    )
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.95), description="decays of the first and the second moment"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    decay_vectors: bool = Field(
        default=True,
        description="also decay tensors of one dimension: norms and biases of full fine-tunes",
    )
    grad_clip_norm: float = Field(
        default=1.0, ge=0, description="largest L2 norm of the gradient; 0 = no clipping"
    )

    @model_validator(mode="after")
    def _final_share_is_used(self) -> "JobFields":
        changed = self.final_lr_share != _default("final_lr_share")
        if self.lr_schedule == "constant" and changed:
            raise ValueError(
                "final_lr_share does nothing while lr_schedule is constant; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _layers_are_of_adapters(self) -> "JobFields":
        changed = [name for name in LAYERS if getattr(self, name) != _default(name)]
        if self.lora_rank is None and changed:
            raise ValueError(
                f"{', '.join(changed)}: layers of adapters, and lora_rank null trains all weights; "
                "set lora_rank, or leave it out"
            )
        if not (self.train_attn or self.train_mlp) and self.train_unembed is not True:
            raise ValueError(
                "no layers are trained: set at least one of train_attn, train_mlp, train_unembed"
            )
        return self

    def lr_share(self, step: int, steps: int) -> float:
        """Return the share of the learning rate in step 1, …, `steps`.

        The first step after the warm-up has the whole rate, the last one `final_lr_share`. Source
        of the cosine: Loshchilov & Hutter, 2017, eq. 5.
        """
        warmup = self.warmup_steps
        if step <= warmup:
            return step / warmup
        if self.lr_schedule == "constant":
            return 1.0
        progress = (step - warmup - 1) / max(1, steps - warmup - 1)
        if self.lr_schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return 1 - (1 - self.final_lr_share) * progress


def _default(name: str) -> Any:
    return JobFields.model_fields[name].default
