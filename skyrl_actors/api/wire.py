"""The JSON bodies of the protocol. Nulls count as absent, and unknown fields are ignored.

`without_effect.FIELDS` lists the known fields that have no effect.
"""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from skyrl_actors.messages.catalog import LONGEST_TTL_S, PROJECT
from skyrl_actors.messages.model import OptimizerName
from skyrl_actors.messages.narrowing import is_object

LARGEST_INT = 2**62  # of numbers that are only identifiers
T = TypeVar("T")
# Without it, pydantic describes each fault of a body: a second for 100,000 of them.
Several = Annotated[list[T], Field(fail_fast=True)]
ProjectId = Annotated[str, Field(min_length=1, max_length=200)]


def _texts(values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"the value of {key[:40]!r} is not a text")
    return values


class Body(BaseModel):
    """Base of all JSON bodies. It removes nulls before fields are checked.

    A null in place of a number with a default is refused: JSON has no NaN and no infinity, so SDKs
    send null for them.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_absent(cls, data: Any) -> Any:
        if not is_object(data):
            return data
        for key, value in data.items():
            field = cls.model_fields.get(key)
            if value is None and field is not None and field.annotation is float:
                raise ValueError(
                    f"{key} is null, which stands for NaN or an infinite number; give a finite "
                    "number, or leave it out"
                )
        return {key: value for key, value in data.items() if value is not None}


class CreateSession(Body):
    """A request to open a session."""

    tags: Several[str] = []
    user_metadata: dict[str, Any] = {}
    sdk_version: str = ""
    display_name: str | None = None
    project_id: ProjectId = PROJECT


class FinishReason(Body):
    """The outcome of a session, for example success."""

    type: str = Field(default="success", max_length=40)


class FinishSession(Body):
    """A request to end a session, with its outcome and an optional explanation."""

    reason: FinishReason = FinishReason()
    detail: str | None = Field(default=None, max_length=10_000)


class SessionRef(Body):
    """A heartbeat of a session."""

    session_id: str


class LoraConfig(Body):
    """The LoRA of a new model. Rank 0 requests a full fine-tune instead."""

    rank: int = Field(default=32, ge=0)
    seed: int | None = None
    train_unembed: bool | None = None  # SDKs always set it
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _a_full_fine_tune_trains_all(self) -> "LoraConfig":
        trains_all = self.train_attn and self.train_mlp and self.train_unembed is not False
        if self.rank == 0 and not trains_all:
            raise ValueError(
                "rank 0 is a full fine-tune, which trains all weights; "
                "give a rank, or leave out train_attn, train_mlp and train_unembed"
            )
        return self


class OptimizerConfig(Body):
    """The optimizer of a new model, which uses it for all steps."""

    model_config = ConfigDict(extra="forbid")

    type: OptimizerName = "adamw"


class CreateModel(Body):
    """A request to create a model. Its id consists of `session_id` and `model_seq_id`."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=LARGEST_INT)
    base_model: str
    user_metadata: dict[str, Any] = {}
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    model_role: str | None = None


class ModelRef(Body):
    """A request that needs only a model's id, to describe or to unload it."""

    model_id: str


class AdamBody(Body):
    """The AdamW settings of one step. `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """A request for an optimizer step. `optimizer_params` is refused; use `adam_params`."""

    model_id: str
    adam_params: AdamBody = AdamBody()
    optimizer_params: dict[str, Any] | None = None
    seq_id: int | None = None


class Ttl(Body):
    """A new lifetime of a checkpoint, which begins now. Null keeps the checkpoint."""

    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)


class SaveWeights(Body):
    """A request to save a training checkpoint. `path` is its name."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    overwrite: bool = False
    user_metadata: dict[str, Any] = {}


class SaveForSampler(Body):
    """A request to save weights, either as `path` (a name) or for a new sampling session."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=LARGEST_INT)
    seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    kind: str = "snapshot"
    user_metadata: dict[str, Any] = {}


class SaveExternal(Body):
    """A request to export weights for other tools. `path` is the name of the export."""

    model_id: str
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    age_encryption_recipients: Several[str] = []


class CopyWeights(Body):
    """A request to copy a checkpoint.

    The target is `session_id` with `model_seq_id`, or `destination_project_id`.
    """

    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=LARGEST_INT)
    destination_project_id: str | None = None
    ttl_seconds: int | None = Field(default=None, gt=0, le=LONGEST_TTL_S)
    weights_access_token: str | None = None


class LoadWeights(Body):
    """A request to load a checkpoint.

    It is loaded into `model_id`, or into a new model of `session_id` and `model_seq_id`. A new
    model has the checkpoint's optimizer, unless `optimizer_config` names another.
    """

    path: str
    model_id: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=LARGEST_INT)
    seq_id: int | None = None
    optimizer: bool = True
    weights_access_token: str | None = None
    optimizer_config: OptimizerConfig | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] = {}


class TinkerPathRef(Body):
    """A request that needs only the path of a checkpoint, to describe it."""

    tinker_path: str


class CreateSamplingSession(Body):
    """A request to open a sampler of `model_path`, or else of `base_model`."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=LARGEST_INT)
    base_model: str | None = None
    model_path: str | None = None


class SamplingParamsBody(Body):
    """How to sample. Without `max_tokens`, an answer can fill the rest of the context."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class PromptBody(Body):
    """A prompt in chunks of text tokens and images."""

    chunks: list[dict[str, Any]]


class Asample(Body):
    """A request to sample with a sampling session, or directly from a checkpoint or base model."""

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
    processed_logprobs: bool | None = None  # this service's addition


class SamplerRef(Body):
    """A sampler that one more copy of a sampling client joins."""

    sampling_session_id: str


class RequestRef(Body):
    """The id of a sample request to cancel."""

    request_id: str


class FuturesTarget(Body):
    """A sampler, and the number of the client's copy that sent the samples."""

    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=LARGEST_INT)


class RetrieveFutures(Body):
    """A request to list samples answered since a cursor."""

    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: Several[str] = []


class SearchCursor(Body):
    """The last session of a page of results. The next page begins after it."""

    last_created_at: datetime
    last_session_id: str


class SearchOwner(Body):
    """Whose sessions to search."""

    type: Literal["own", "accessible"] = "own"


class SessionStatusQuery(Body):
    """A status to search for. No session of this service is ever cancelled or failed."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Several[str] | None = Field(default=None, min_length=1)


class SearchSessions(Body):
    """The filters of a session search. An absent filter matches every session."""

    session_id: str | None = None
    display_name: str | None = Field(default=None, min_length=1)
    user_metadata: Annotated[dict[str, Any], AfterValidator(_texts)] = {}
    statuses: Several[SessionStatusQuery] | None = Field(default=None, min_length=1)
    project_ids: Several[ProjectId] | None = None
    owner: SearchOwner = SearchOwner()
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


class LossInput(Body):
    """An input of a custom loss: its name and its number of dimensions."""

    name: str
    rank: int


class CreateCustomLoss(Body):
    """A request to register a loss that the SDK has traced to a graph."""

    session_id: str
    custom_loss_seq_id: int = Field(default=0, ge=0, le=LARGEST_INT)
    name: str = Field(max_length=200)
    inputs: Several[LossInput]
    graph: dict[str, Any]


class RetrieveFuture(Body):
    """A request for the result of a future."""

    request_id: str
    allow_metadata_only: bool = False
