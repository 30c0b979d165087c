"""What API keys may use, and what they used."""

from dataclasses import dataclass, fields

HOUR_S = 3600
DAY_S = 24 * HOUR_S
ALL_KEYS = "*"
"""The owner of the quota of keys that have none of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The limits of an API key, and its part of what tenants share. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts, samples and training
    tokens_per_day: int | None = None  # of a day in UTC
    open_requests: int | None = None  # accepted and not answered
    models: int | None = None  # None: limits.models_per_key
    samplers: int | None = None  # open at a time
    checkpoint_bytes: int | None = None
    weight: float = 1.0  # a key of weight 2 gets twice the share of a key of weight 1


LIMITS = tuple(field.name for field in fields(Quota) if field.name != "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerQuota:
    """The quota of an owner, which all keys of one name share."""

    owner: str  # or ALL_KEYS
    name: str
    quota: Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the answered requests of one session used in one hour."""

    hour: int  # its begin, in seconds since the epoch
    owner: str  # "" without API keys
    session_id: str  # "" for requests without a session
    base_model: str
    requests: int = 0
    failed: int = 0  # of these requests
    trained_tokens: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    checkpoints: int = 0

    @property
    def tokens(self) -> int:
        return self.trained_tokens + self.prompt_tokens + self.sampled_tokens


COUNTED = ("requests", "failed", "trained_tokens", "prompt_tokens", "sampled_tokens", "checkpoints")
"""The fields of `Usage` that are added up."""
