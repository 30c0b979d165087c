"""Traces and logs of a service. Metrics are always exported through Ray."""

from typing import Literal

from pydantic import Field

from skyrl_actors.config.frozen import FrozenConfig


class ObserveConfig(FrozenConfig):
    """Traces and log lines of the service. Metrics are always exported through Ray."""

    otlp: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="address of an OpenTelemetry collector, for example http://host:4318; "
        "each request becomes a trace",
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="format of the log lines of controller, ingress, ranks and engines",
    )
