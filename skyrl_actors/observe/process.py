"""Configure the logs and spans of a process as its service is configured, and read its memory.

Ranks and engines read this from environment variables, before they receive a spec.
"""

import logging
import os
from dataclasses import dataclass
from typing import Literal, cast

import psutil

from skyrl_actors.observe.log import set_up_logging
from skyrl_actors.observe.spans import SPANS

PREFIX = "SKYRL_ACTORS_OBSERVED_"
SERVICE_VARIABLE = f"{PREFIX}SERVICE"  # set in ranks and engines


@dataclass(frozen=True, slots=True)
class Observed:
    """The settings of logs and spans."""

    service: str
    otlp: str | None
    log_format: Literal["text", "json"]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that `observed` reads in the process of an actor."""
        return {
            SERVICE_VARIABLE: self.service,
            f"{PREFIX}OTLP": self.otlp or "",
            f"{PREFIX}LOG_FORMAT": self.log_format,
        }

    def begin(self, part: str, level: int = logging.INFO) -> None:
        """Apply the settings to this process.

        `part` names the process in its service, for example policy[0]. It is a field of JSON log
        lines and part of the service name of spans.
        """
        set_up_logging(level, self.log_format, service=self.service, part=part)
        SPANS.send_to(self.otlp, self.service, part)


def observed() -> Observed:
    """Read the settings from the environment variables. By default no spans are sent."""
    read = os.environ.get
    form = cast("Literal['text', 'json']", read(f"{PREFIX}LOG_FORMAT", "text"))
    return Observed(read(SERVICE_VARIABLE, ""), read(f"{PREFIX}OTLP") or None, form)


def resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process; 0 if it has ended or may not be read."""
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
