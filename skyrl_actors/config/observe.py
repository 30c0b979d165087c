"""How a service is looked at from outside; metrics go through Ray in any case."""

from typing import Literal

from pydantic import Field

from skyrl_actors.config.base import FrozenConfig


class ObserveConfig(FrozenConfig):
    otlp: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="an OpenTelemetry collector, as http://host:4318: each request becomes a trace",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="of the lines of controller, ingress, ranks and engines"
    )
