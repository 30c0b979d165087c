"""What every job says of AdamW beside its rate."""

from pydantic import Field

from skyrl_actors.config.base import FrozenConfig


class AdamFields(FrozenConfig):
    final_lr_share: float = Field(default=0.1, ge=0, le=1, description="rates fall linearly to this share of their start")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=1.0, ge=0, description="0 = gradients are not clipped")
