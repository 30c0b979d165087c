"""The config of shards: controllers that divide the sessions of one service."""

from typing import Literal

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig

MOST_SHARDS = 64


class ShardsConfig(FrozenConfig):
    """Controllers of a service. Each has its own journal, training groups and engines."""

    count: int = Field(
        default=1,
        ge=1,
        le=MOST_SHARDS,
        description="number of controllers. Each has the groups and engines of this config for "
        "itself, so the service needs this many times the devices; see "
        "[Several controllers](../how-to/shards.md)",
    )
    spread: Literal["session", "key"] = Field(
        default="session",
        description="what stays on one controller. session: each session, and new ones go to the "
        "controllers in turn; key: all sessions of an API key, which limits of keys need",
    )
