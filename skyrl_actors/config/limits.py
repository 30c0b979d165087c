"""Limits for one client and for all clients of a service."""

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig


class LimitsConfig(FrozenConfig):
    """Limits for clients. Beyond a limit, the answer is 413, 422 or 429 and contains the limit."""

    body_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="size of a request body, also after decompression"
    )
    tokens: int = Field(
        default=2**22, ge=1, description="tokens of all datums of one request together"
    )
    images: int = Field(default=1024, ge=0, description="images of one request together")
    image_bytes: int = Field(
        default=16 * 2**20, ge=1, description="size of an encoded image, PNG or JPEG"
    )
    image_pixels: int = Field(
        default=2**25, ge=1, description="width times height of an image before it is resized"
    )
    request_pixels: int = Field(
        default=2**28, ge=1, description="pixels of all different images of one request together"
    )
    open_requests: int = Field(
        default=20_000,
        ge=1,
        description="accepted requests without an answer, of all clients together; an API key "
        "cannot hold more of them than the number that is still free, so that other keys get some",
    )
    queued_bytes: int = Field(
        default=64 * 2**30,
        ge=2**20,
        description="payloads of open requests in the journal folder; "
        "divided between keys in the same way as open_requests",
    )
    low_free_bytes: int = Field(
        default=10 * 2**30,
        ge=0,
        description="free space of journal.folder or checkpoint_dir below which `status` warns",
    )
    scarce_free_bytes: int = Field(
        default=2 * 2**30,
        ge=0,
        description="free space below which the API key whose checkpoints have the most bytes "
        "gets 429",
    )
    full_free_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        description="free space below which all new requests get 503; "
        "the rest is for answers of accepted ones",
    )
    route_bytes: int = Field(
        default=4 * 2**30,
        ge=2**20,
        description="host memory of the controller for routes of samples (router_replay); "
        "beyond it, the model with the most bytes loses its oldest, whose tokens then choose "
        "their experts",
    )
    models_per_key: int = Field(
        default=64, ge=1, description="models of one API key that exist at once"
    )
    samples_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="sequences in the engines of a base model at once, and the most of one "
        "request; others queue, and the tenant with the fewest sampled tokens is first; "
        "null = a quarter more than the engines compute at once (at least 64 more), and 512 in one "
        "request, or what the engines compute at once if that is more",
    )
    full_sampler_versions: int = Field(
        default=4,
        ge=1,
        description="unnamed full-weight samplers that are kept for a model; "
        "older ones are refused",
    )
    session_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="time without a heartbeat after which the models of a session are freed; "
        "time in which no client reaches the service does not count",
    )
