"""Requests to the controller (frozen). `seq_id` orders the requests of one model."""

from dataclasses import dataclass, field

from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import AdamParams, LossCall, ModelSpec, OptimizerName
from skyrl_actors.messages.sampling import PromptTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """Create a model, optionally from a checkpoint."""

    spec: ModelSpec
    session_id: str
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    from_path: str | None = None  # a tinker path of kind weights to start from
    with_optimizer: bool = False  # with from_path: load the moments too
    # With from_path; None: the checkpoint's. A base model in `spec` must equal the checkpoint's.
    optimizer: OptimizerName | None = None

    @property
    def model_id(self) -> str:
        return self.spec.model_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Compute a loss, and add its gradient unless `forward_only`."""

    model_id: str
    columns: Columns
    loss: LossCall
    forward_only: bool = False
    seq_id: int | None = None


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Make an optimizer step with the pending gradients."""

    model_id: str
    adam: AdamParams
    seq_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Save a training checkpoint (weights, optimizer) as tinker://<model_id>/weights/<name>."""

    model_id: str
    name: str
    overwrite: bool = False
    seq_id: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    ttl_seconds: int | None = None  # None: it is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForSampler:
    """Save weights for sampling.

    With a name they are kept as tinker://<model_id>/sampler_weights/<name>. Without one they are
    kept for the sampler `sampler_id` until the session ends.
    """

    model_id: str
    name: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    ttl_seconds: int | None = None  # with a name only


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveExternal:
    """Save weights in Hugging Face's or peft's format for other tools.

    The path is tinker://<model_id>/external_weights/<name>. The files are encrypted with age for
    `recipients`, if there are any.
    """

    model_id: str
    name: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    recipients: tuple[str, ...] = ()  # public keys


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Load a checkpoint. With `mixed_with`, mix (1 − share) of that one and share of `path`."""

    model_id: str
    path: str
    with_optimizer: bool
    seq_id: int | None = None
    mixed_with: str | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Unload:
    """Delete a model. Its samplers keep their weights."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What changes the distribution beside temperature, top_k and top_p, as in OpenAI and vLLM.

    Logprobs stay those of the model without it, but for `json_schema`: engines leave out the tokens
    that the schema forbids before they take logprobs.
    """

    min_p: float = 0.0  # leaves out tokens below this part of the likeliest one's probability
    frequency_penalty: float = 0.0  # taken from a logit for each time the token was sampled
    presence_penalty: float = 0.0  # taken from a logit if the token was sampled
    repetition_penalty: float = 1.0  # divides the logit of a token of the prompt or the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    json_schema: str | None = None  # the text is JSON of this schema; "": any JSON object


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample.

    stop None means the model's own end-of-text tokens; an empty tuple means no stop; otherwise only
    these stop. top_k -1 and top_p 1 mean off. Sample i of `num_samples` uses seed + i.
    """

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
    prompt_logprobs_last_n: int | None = None  # only the prompt's last n tokens; None: all
    prompt_targets: PromptTargets | None = None  # ids to score along the prompt
    prompt_alternatives: int = 0  # draws to make at each position of the prompt
    stop_at_end_too: bool = False  # with `stop`: also stop at end-of-text tokens
    stream: bool = False  # the client reads tokens as they arrive; for one sample only
    tools: str | None = None  # JSON of OpenAI's list; also return the calls in the answer
    # Also return the logprobs at `temperature`. Those at temperature 1 are always returned.
    tempered_logprobs: bool = False
    # Also return the logprobs at `temperature`, restricted by top_k and top_p.
    processed_logprobs: bool = False
    shaping: Shaping | None = None

    @property
    def truncates(self) -> bool:
        """Whether top_k or top_p leaves out tokens."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def processes(self) -> bool:
        """Whether logprobs are requested that differ from those of the model at temperature 1.

        A greedy sample gets those at 1.
        """
        tempers = (self.tempered_logprobs or self.processed_logprobs) and self.temperature != 1
        truncates = self.processed_logprobs and self.truncates
        return self.temperature != 0 and (tempers or truncates)

    @property
    def shows_processed(self) -> bool:
        """Whether the client is shown logprobs of the sampling distribution."""
        return self.tempered_logprobs or self.processed_logprobs

    @property
    def is_repeated(self) -> bool:
        """Whether all samples are equal: greedy ones are computed once and returned repeatedly."""
        return self.temperature == 0 and self.num_samples > 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the full distribution at each prompt position is needed."""
        return self.prompt_targets is not None or self.prompt_alternatives > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Generate from one prompt with the weights of `sampler_id`."""

    sampler_id: str
    prompt: tuple[int, ...]  # with the placeholder at each token of an image
    params: SamplingParams
    seq_id: int | None = None
    pictures: tuple[Picture, ...] = ()


ModelRequest = (
    ForwardBackward
    | OptimStep
    | SaveWeights
    | SaveForSampler
    | SaveExternal
    | LoadWeights
    | Unload
    | CreateModel
)
Request = ModelRequest | Sample
