"""The specification of a model: its id, role, base model and kind (LoRA or full fine-tune)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Role = Literal["policy", "critic"]
OptimizerName = Literal["adamw", "adamw8bit", "muon"]
ExpertLayout = Literal["shared_outer", "per_expert"]
CheckpointForm = Literal["training", "weights", "merged"]
"""Contents of a checkpoint.

training: weights and the optimizer's moments. weights: without moments. merged: base and adapter as
one model.
"""
ROLES: tuple[Role, ...] = ("policy", "critic")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A low-rank adapter, W + (alpha / rank) · B A, on the linear layers selected by the switches.

    alpha is a constant of the service (32 unless configured), as in the Tinker service. Clients do
    not send it.
    """

    rank: int
    alpha: float = 32.0
    train_attn: bool = True
    train_mlp: bool = True
    # None: not given; the service sets it to what its engines can sample
    train_unembed: bool | None = True
    # shared_outer: routed experts share the factor at the hidden size, as in the Tinker service
    expert_layout: ExpertLayout = "shared_outer"


class ModelKind(NamedTuple):
    """What models have in common that share slots."""

    role: Role
    is_lora: bool
    base_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to build. `lora` None means a full fine-tune: all base weights are trained."""

    model_id: str
    base_model: str
    role: Role = "policy"
    lora: LoraSpec | None = None
    seed: int = 0
    optimizer: OptimizerName = "adamw"
    train_tower: bool = False  # of a full fine-tune: the vision tower's weights as well

    @property
    def kind(self) -> ModelKind:
        """The kind of this model. Models of one kind share slots."""
        return ModelKind(self.role, self.lora is not None, self.base_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW with decoupled weight decay (Loshchilov & Hutter, 2019).

    grad_clip_norm 0 means no clipping. Without decay_vectors, tensors of one dimension (norms and
    biases of a full fine-tune) get no weight decay.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    decay_vectors: bool = True


@dataclass(frozen=True, slots=True)
class LossCall:
    """A loss by its registry name, with its options.

    For example, LossCall("ppo", {"clip_low_threshold": 0.8}).
    """

    name: str
    config: dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTopology:
    """How one engine is spread over devices."""

    tensor_parallel: int = 1  # devices that share each layer
    pipeline_parallel: int = 1  # stages of layers, each on `tensor_parallel` devices

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel
