"""Results of the controller: one type for each verb, or a Failure."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.errors import Category, SkyrlActorsError
from skyrl_actors.messages.sampling import PromptAlternatives, TargetLogprobs


@dataclass(frozen=True, slots=True)
class ModelCreated:
    """The new model can be trained."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Per-token outputs of a forward or forward_backward, in the caller's row order.

    `fields`: logprobs, values or elementwise_loss, each [ΣT] float32, or [ΣT, K] with `widths` as
    in Columns. Metric names contain one colon, followed by how chunks combine ("loss:sum").
    """

    offsets: NDArray[np.int64]  # [N+1]
    fields: dict[str, NDArray[np.float32]]
    metrics: dict[str, float]  # with compute_s:sum, the seconds inside the slowest rank
    widths: NDArray[np.int64] | None = None  # [N]


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step was made."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint or an export was saved. `path` is its tinker path."""

    path: str
    folder: str  # where the files are, for clients on the same machine (jobs)
    num_bytes: int | None = None  # of an export


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSaved:
    """Weights were saved for `sampler_id`, or as the tinker path `path`; the other is None."""

    sampler_id: str | None
    path: str | None
    version: str
    num_bytes: int = 0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint was loaded into a new or existing model."""

    model_id: str
    path: str
    version: str = ""  # of the loaded files


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The model was deleted."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The calls of tools in an answer, and the rest of its text."""

    content: str | None
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sampled answer of R tokens."""

    tokens: NDArray[np.int32]  # [R], the stop token included
    logprobs: NDArray[np.float32]  # [R], at temperature 1
    stop_reason: str  # "stop" or "length"
    topk_ids: NDArray[np.int32] | None = None  # [R, K]; empty cells have id 0, logprob -99999
    # [R, K], of the same distribution as `shown_logprobs`
    topk_logprobs: NDArray[np.float32] | None = None
    # [R], of the sampling distribution, if requested: tempered, or processed (with top_k and top_p)
    tempered: NDArray[np.float32] | None = None
    # [P + R - 1, layers · k], expert + 1 of the prompt and all but the last token; for the trainer
    routes: NDArray[np.uint8 | np.int16] | None = None
    parsed: ParsedAnswer | None = None  # if the request has tools

    @property
    def shown_logprobs(self) -> NDArray[np.float32]:
        """The logprobs for the client: of the sampling distribution if requested, else at 1."""
        return self.logprobs if self.tempered is None else self.tempered


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """The sequences of one sample, and scores of its prompt of P tokens."""

    sequences: tuple[Sequence, ...]
    version: str  # of the weights that were sampled from
    prompt_logprobs: NDArray[np.float32] | None = None  # [P]; the first is NaN
    topk_prompt_ids: NDArray[np.int32] | None = None  # [P, K]; empty: id 0, logprob -99999
    topk_prompt_logprobs: NDArray[np.float32] | None = None  # [P, K]
    cached_tokens: int = 0
    targets: TargetLogprobs | None = None
    alternatives: PromptAlternatives | None = None


def without_routes(result: "Result") -> "Result":
    """Return a result without what only trainers use."""
    if not isinstance(result, SampleOutput) or all(one.routes is None for one in result.sequences):
        return result
    return replace(result, sequences=tuple(replace(one, routes=None) for one in result.sequences))


@dataclass(frozen=True, slots=True)
class PartialSample:
    """New tokens of a running sample, and the logprobs that its client is shown."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


CANCELLED_KIND = "Cancelled"  # the kind of a failure that a client or an operator asked for


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed. `kind` is the class of the error."""

    message: str
    category: Category = "server"
    kind: str = field(default="InternalError")

    @staticmethod
    def of(error: BaseException) -> "Failure":
        category: Category = error.category if isinstance(error, SkyrlActorsError) else "server"
        text = (
            str(error)
            if isinstance(error, SkyrlActorsError)
            else f"{type(error).__name__}: {error}"
        )
        return Failure(text, category, type(error).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sample that was answered. `clone` numbers the copies of a sampling client."""

    number: int
    request_id: str
    failed: bool
    clone: int


Pause = Literal["starting", "recording", "recovering", "unreachable"]
PAUSES: dict[Pause, str] = {
    "starting": "the service is still starting",
    "recording": "the service cannot write its journal now; accepted requests wait until it can",
    "recovering": "a part of the service is being restarted; requests resume by themselves",
    "unreachable": "the service's controller does not answer now; requests are repeated",
}
"""Reasons that every client may see. Operators find details in `status`, `/healthz` and the log."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """No answer yet. `state` is "active", or "paused_capacity" with a reason; clients show it."""

    state: str = "active"
    reason: str | None = None

    @staticmethod
    def paused(why: Pause) -> "Waiting":
        """Return a state that clients show with this reason."""
        return Waiting("paused_capacity", f"{why}: {PAUSES[why]}")


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer exists and is large: it must be fetched separately."""

    num_bytes: int


Result = (
    ModelCreated
    | LossOutput
    | StepDone
    | Saved
    | SamplerSaved
    | Loaded
    | Unloaded
    | SampleOutput
    | Failure
)
