"""The JSON bodies of the protocol. Nulls count as absent, and unknown fields are ignored."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from skyrl_actors.messages.catalog import LONGEST_TTL_S
from skyrl_actors.messages.model import OptimizerName

LARGEST_INT = 2**62  # of numbers that are only identifiers


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_absent(cls, data: Any) -> Any:
        return (
            {key: value for key, value in data.items() if value is not None}
            if isinstance(data, dict)
            else data
        )


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] = {}
    sdk_version: str = ""
    display_name: str | None = None


class FinishReason(Body):
    type: str = Field(default="success", max_length=40)


class FinishSession(Body):
    reason: FinishReason = FinishReason()
    detail: str | None = Field(default=None, max_length=10_000)


class SessionRef(Body):
    session_id: str


class LoraConfig(Body):
    rank: int = Field(default=32, ge=0)
    seed: int | None = None
    train_unembed: bool | None = None  # SDKs always set it
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: OptimizerName = "adamw"


class CheckpointsOptimizer(Body):
    """A model from a checkpoint has the checkpoint's optimizer, so only the default is accepted."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0, le=LARGEST_INT)
    base_model: str
    user_metadata: dict[str, Any] = {}
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    model_role: str | None = None


class ModelRef(Body):
    model_id: str


class AdamBody(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    model_id: str
    adam_params: AdamBody = AdamBody()
    optimizer_params: dict[str, Any] | None = None
    seq_id: int | None = None


class Ttl(Body):
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)


class SaveWeights(Body):
    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    overwrite: bool = False
    user_metadata: dict[str, Any] = {}


class SaveForSampler(Body):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=LARGEST_INT)
    seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    kind: str = "snapshot"
    user_metadata: dict[str, Any] = {}


class SaveExternal(Body):
    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    age_encryption_recipients: list[str] = []


class CopyWeights(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=LARGEST_INT)
    destination_project_id: str | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    weights_access_token: str | None = None


class LoadWeights(Body):
    path: str
    model_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=LARGEST_INT)
    seq_id: int | None = None
    optimizer: bool = True
    weights_access_token: str | None = None
    optimizer_config: CheckpointsOptimizer = CheckpointsOptimizer()
    user_metadata: dict[str, Any] = {}


class TinkerPathRef(Body):
    tinker_path: str


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=LARGEST_INT)
    base_model: str | None = None
    model_path: str | None = None


class SamplingParamsBody(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class PromptBody(Body):
    chunks: list[dict[str, Any]]


class Asample(Body):
    prompt: PromptBody
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: int = 1
    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool = False
    tempered_logprobs: bool | None = None  # this service's addition


class SamplerRef(Body):
    sampling_session_id: str


class RequestRef(Body):
    request_id: str


class FuturesTarget(Body):
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=LARGEST_INT)


class RetrieveFutures(Body):
    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: list[str] = []


class SearchCursor(Body):
    last_created_at: datetime
    last_session_id: str


class SearchSessions(Body):
    session_id: str | None = None
    display_name: str | None = Field(default=None, min_length=1)
    user_metadata: dict[str, str] = {}
    statuses: list[dict[str, Any]] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


class LossInput(Body):
    name: str
    rank: int


class CreateCustomLoss(Body):
    session_id: str
    custom_loss_seq_id: int = Field(default=0, ge=0, le=LARGEST_INT)
    name: str = Field(max_length=200)
    inputs: list[LossInput]
    graph: dict[str, Any]


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False
