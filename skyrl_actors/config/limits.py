"""What one client, and all clients together, may ask of a service."""

from pydantic import Field

from skyrl_actors.config.base import FrozenConfig


class LimitsConfig(FrozenConfig):
    """What one client may ask. Over a bound the answer is 413, 422 or 429 and says what is allowed."""

    body_bytes: int = Field(default=64 * 2**20, ge=1024, description="of a request, also after decompression")
    body_memory_bytes: int = Field(
        default=512 * 2**20,
        ge=1024,
        description="of large bodies that one ingress process reads and decodes at once; more wait",
    )
    datums: int = Field(default=1024, ge=1, description="of one forward or forward_backward")
    tokens: int = Field(default=2**22, ge=1, description="of all datums of one request together")
    num_samples: int = Field(default=256, ge=1, description="of one asample; max_tokens is bound by engine.max_model_len")
    open_requests: int = Field(default=20_000, ge=1, description="accepted and not yet answered, of all clients")
    open_requests_per_key: int = Field(
        default=10_000,
        ge=1,
        description="the same, of the holder of one API key; it may also have no more than are free, so that some are left for the "
        "next key",
    )
    queued_bytes: int = Field(
        default=64 * 2**30,
        ge=2**20,
        description="of the payloads of open requests, in the journal's folder; shared between keys as open_requests are",
    )
    payload_memory_bytes: int = Field(
        default=2**30,
        ge=2**20,
        description="of payloads in the controller's memory; payloads beyond it are read from the journal when they run",
    )
    result_memory_bytes: int = Field(
        default=256 * 2**20,
        ge=2**20,
        description="of answers in the controller's memory; older ones are read from the journal",
    )
    sessions_per_key: int = Field(default=1000, ge=1, description="open at once")
    models_per_key: int = Field(default=64, ge=1, description="alive at once")
    samples_in_flight: int = Field(
        default=512,
        ge=1,
        description="sequences in the engines at once; more wait, and the tenant that was given the fewest tokens goes first",
    )
    full_sampler_versions: int = Field(
        default=4, ge=1, description="unnamed full-weight samplers kept for a model; older ones are refused"
    )
    lora_sampler_versions: int = Field(default=256, ge=1, description="the same for a LoRA model")
    result_ttl_s: float = Field(default=30.0, gt=0, description="how long an answer stays in memory; the journal keeps it longer")
    session_silent_s: float = Field(
        default=30.0,
        gt=0,
        description="silence after which a session ends when its place is wanted; SDKs send a heartbeat every 10 s",
    )
    create_wait_s: float = Field(
        default=600.0, gt=0, description="how long a create waits for room until it fails; after a restart anew"
    )
    session_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="silence after which a session's models are freed; time in which no client is heard does not count",
    )
