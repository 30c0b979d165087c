"""How many bytes a body may have: what the model could ever take (pure)."""

from skyrl_actors.backends.base import Capabilities
from skyrl_actors.config.limits import LimitsConfig

SMALL_BYTES = 256 * 2**10  # any body but those of batches and prompts: names, numbers, metadata
SAMPLE_BYTES_PER_TOKEN = 512  # a token id, and the ids to score at its position
TEXT_BYTES_PER_TOKEN = 64
BATCHES = ("/api/v1/forward_backward", "/api/v1/forward")
UNREAD = ("/api/v1/telemetry",)
PROMPTS = {
    "/api/v1/asample": SAMPLE_BYTES_PER_TOKEN,
    "/v1/completions": TEXT_BYTES_PER_TOKEN,
    "/v1/chat/completions": TEXT_BYTES_PER_TOKEN,
}


def limit_of(path: str, limits: LimitsConfig, able: Capabilities | None) -> int:
    """The most bytes that a body for this path may have, also after decompression. `able` None: not known yet."""
    if path in BATCHES or path in UNREAD:
        return limits.body_bytes
    per_token = PROMPTS.get(path)
    if per_token is None:
        return min(SMALL_BYTES, limits.body_bytes)
    if able is None:
        return limits.body_bytes
    return min(limits.body_bytes, SMALL_BYTES + per_token * able.max_sample_tokens)
