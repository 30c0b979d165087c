"""What the controller can be asked. Each request is frozen; `seq_id` orders the requests of one model."""

from dataclasses import dataclass, field

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.model import AdamParams, LossCall, ModelSpec
from skyrl_actors.messages.sampling import PromptTargets


@dataclass(frozen=True, slots=True)
class CreateModel:
    spec: ModelSpec
    session_id: str
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    from_path: str | None = None  # a tinker path of kind weights: start from that checkpoint
    with_optimizer: bool = False  # with from_path: the moments too

    @property
    def model_id(self) -> str:
        return self.spec.model_id


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    model_id: str
    columns: Columns
    loss: LossCall
    forward_only: bool = False
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class OptimStep:
    model_id: str
    adam: AdamParams
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """A training checkpoint (weights, optimizer) under tinker://<model_id>/weights/<name>."""

    model_id: str
    name: str
    overwrite: bool = False
    seq_id: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    ttl_seconds: int | None = None  # None: it stays


@dataclass(frozen=True, slots=True)
class SaveForSampler:
    """Weights for sampling: with a name kept under tinker://<model_id>/sampler_weights/<name>, without one kept
    as long as the session, for the sampler `sampler_id`."""

    model_id: str
    name: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    ttl_seconds: int | None = None  # of the named one


@dataclass(frozen=True, slots=True)
class SaveExternal:
    """Weights for other tools, in Hugging Face's or peft's format, under tinker://<model_id>/external_weights/<name>."""

    model_id: str
    name: str
    seq_id: int | None = None
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """With `mixed_with`, the weights become (1 − share) of that checkpoint's and share of `path`'s."""

    model_id: str
    path: str
    with_optimizer: bool
    seq_id: int | None = None
    mixed_with: str | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Unload:
    model_id: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """stop None = the model's own end-of-text tokens; an empty tuple = no stop at all; otherwise these only.
    top_k -1 and top_p 1 mean off. The i-th of `num_samples` draws with seed + i."""

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None  # only of so many tokens at the prompt's end; None: of all
    prompt_targets: PromptTargets | None = None  # ids to score along the prompt
    prompt_alternatives: int = 0  # draws to make at each position of the prompt
    stop_at_end_too: bool = False  # with `stop`: at the end-of-text tokens as well
    stream: bool = False  # somebody reads along; of one sample only
    tempered_logprobs: bool = False  # answer also the logprobs at `temperature`; those at 1 are always answered

    @property
    def tempers(self) -> bool:
        """The logprobs at `temperature` are asked for and differ from those at 1, which a greedy sample gets too."""
        return self.tempered_logprobs and self.temperature not in (0.0, 1.0)

    @property
    def is_repeated(self) -> bool:
        """Greedy samples of one prompt are equal: one is computed, and answered `num_samples` times."""
        return self.temperature == 0 and self.num_samples > 1

    @property
    def scores_prompt(self) -> bool:
        """The whole distribution at each position of the prompt is looked at."""
        return self.prompt_targets is not None or self.prompt_alternatives > 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Generate from one prompt with the weights of `sampler_id`."""

    sampler_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seq_id: int | None = None


ModelRequest = ForwardBackward | OptimStep | SaveWeights | SaveForSampler | SaveExternal | LoadWeights | Unload | CreateModel
Request = ModelRequest | Sample
