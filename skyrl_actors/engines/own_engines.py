"""Which samples need an engine of this service, not one by URL (pure)."""

from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.versions import full_version
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import SamplerWeights

NO_SCORES = (
    "target_prompt_logprobs, prompt_alt_tokens_k, tempered_logprobs and processed_logprobs need "
    "engines of this service, and engine.num_engines is 0"
)
NO_IMAGES = (
    "prompts with images need engines of this service, and engine.num_engines is 0; send text"
)
NO_FULL_WEIGHTS = (
    "full weights can be sampled only by engines of this service, and engine.num_engines is 0"
)


def needs_own(weights: SamplerWeights, params: SamplingParams, has_images: bool) -> bool:
    """Return whether only an engine of this service can serve this sample.

    Engines by URL serve the base and adapters, without prompt scores, processed logprobs or images.
    """
    is_full = full_version(weights) != BASE_VERSION
    return is_full or has_images or params.scores_prompt or params.processes


def why_none(params: SamplingParams, has_images: bool) -> str:
    """Return why a service without such an engine refuses the sample."""
    if params.scores_prompt or params.processes:
        return NO_SCORES
    return NO_IMAGES if has_images else NO_FULL_WEIGHTS
