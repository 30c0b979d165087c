"""What a model is: its id, role, base model and kind (a LoRA adapter or a full fine-tune)."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["policy", "critic"]
OptimizerName = Literal["adamw", "adamw8bit", "muon"]
CheckpointForm = Literal["training", "weights", "merged"]
"""With the optimizer's moments; without; or as one full model of the base and the adapter together."""
ROLES: tuple[Role, ...] = ("policy", "critic")


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A low-rank adapter: W + (alpha / rank) · B A, on the linear layers that the switches name.

    alpha is a constant of the service (32 unless configured), as in the Tinker service: it does not travel.
    """

    rank: int
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool | None = True  # None: not named; the service sets it to what its engines can sample


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to build. `lora` None means a full fine-tune: all weights of the base model are trained."""

    model_id: str
    base_model: str
    role: Role = "policy"
    lora: LoraSpec | None = None
    seed: int = 0
    optimizer: OptimizerName = "adamw"

    @property
    def kind(self) -> tuple[Role, bool]:
        """What it competes for a place with: models of its role that are LoRA adapters too, or full fine-tunes too."""
        return self.role, self.lora is not None


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW with decoupled weight decay (Loshchilov & Hutter, 2019); grad_clip_norm 0 = no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class LossCall:
    """A loss by its registry name with its options, e.g. LossCall("ppo", {"clip_low_threshold": 0.8})."""

    name: str
    config: dict[str, float | str]
