"""What the controller answers: one type for each verb, or a Failure."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.errors import Category, SkyrlActorsError
from skyrl_actors.messages.sampling import PromptAlternatives, TargetLogprobs


@dataclass(frozen=True, slots=True)
class ModelCreated:
    model_id: str


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Per-token outputs of a forward or forward_backward, in the caller's row order.

    `fields`: logprobs, values or elementwise_loss, each [ΣT] float32, or [ΣT, K] with `widths` as in Columns. Metric names
    carry one colon and say how chunks combine ("loss:sum").
    """

    offsets: NDArray[np.int64]  # [N+1]
    fields: dict[str, NDArray[np.float32]]
    metrics: dict[str, float]  # with compute_s:sum, the seconds inside the slowest rank
    widths: NDArray[np.int64] | None = None  # [N]


@dataclass(frozen=True, slots=True)
class StepDone:
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    path: str
    folder: str  # where the files are, for clients on the same machine (jobs)
    num_bytes: int | None = None  # of an export


@dataclass(frozen=True, slots=True)
class SamplerSaved:
    sampler_id: str | None
    path: str | None
    version: str
    num_bytes: int = 0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loaded:
    model_id: str
    path: str
    version: str = ""  # of the files that were loaded


@dataclass(frozen=True, slots=True)
class Unloaded:
    model_id: str


@dataclass(frozen=True, slots=True)
class Sequence:
    tokens: NDArray[np.int32]  # [R], the stop token included
    logprobs: NDArray[np.float32]  # [R], at temperature 1
    stop_reason: str  # "stop" or "length"
    topk_ids: NDArray[np.int32] | None = None  # [R, K]; empty cells id 0, logprob -99999
    topk_logprobs: NDArray[np.float32] | None = None  # [R, K], of the same temperature as `shown_logprobs`
    tempered: NDArray[np.float32] | None = None  # [R], of softmax(logits / temperature), where it was asked for

    @property
    def shown_logprobs(self) -> NDArray[np.float32]:
        """What a client is answered: at the sample's temperature where it asked for that, else at 1."""
        return self.logprobs if self.tempered is None else self.tempered


@dataclass(frozen=True, slots=True)
class SampleOutput:
    sequences: tuple[Sequence, ...]
    version: str  # of the weights that answered
    prompt_logprobs: NDArray[np.float32] | None = None  # [P], NaN first
    topk_prompt_ids: NDArray[np.int32] | None = None  # [P, K]; empty cells id 0, logprob -99999
    topk_prompt_logprobs: NDArray[np.float32] | None = None  # [P, K]
    cached_tokens: int = 0
    targets: TargetLogprobs | None = None
    alternatives: PromptAlternatives | None = None


@dataclass(frozen=True, slots=True)
class PartialSample:
    """Of a sample that is on its way: some tokens and the logprobs that its client is shown."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    message: str
    category: Category = "server"
    kind: str = field(default="InternalError")

    @staticmethod
    def of(error: BaseException) -> "Failure":
        category: Category = error.category if isinstance(error, SkyrlActorsError) else "server"
        text = str(error) if isinstance(error, SkyrlActorsError) else f"{type(error).__name__}: {error}"
        return Failure(text, category, type(error).__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """That a sample was answered. `clone`: which copy of a sampling client asked."""

    number: int
    request_id: str
    failed: bool
    clone: int


Pause = Literal["starting", "recording", "recovering", "unreachable"]
PAUSES: dict[Pause, str] = {
    "starting": "the service is still starting",
    "recording": "the service can not write its journal now; accepted requests wait until it can",
    "recovering": "a part of the service is being restarted, and goes on by itself",
    "unreachable": "the service's controller does not answer now, and is asked again",
}
"""What any client may be told of a fault; operators read the rest in `status`, `/healthz` and the log."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """No answer yet. `state` is what clients show: "active", or "paused_capacity" with the reason."""

    state: str = "active"
    reason: str | None = None

    @staticmethod
    def paused(why: Pause) -> "Waiting":
        return Waiting("paused_capacity", f"{why}: {PAUSES[why]}")


Result = ModelCreated | LossOutput | StepDone | Saved | SamplerSaved | Loaded | Unloaded | SampleOutput | Failure
