"""Logs and spans of one process, as its service is configured. Ranks and engines read it from their environment, before they have a spec."""

import logging
import os
from dataclasses import dataclass
from typing import Literal, cast

from skyrl_actors.observe.log import set_up_logging
from skyrl_actors.observe.spans import SPANS

PREFIX = "SKYRL_ACTORS_OBSERVED_"


@dataclass(frozen=True, slots=True)
class Observed:
    service: str
    otlp: str | None
    log_format: Literal["text", "json"]

    @property
    def environment(self) -> dict[str, str]:
        """What `observed` reads in an actor's process."""
        return {f"{PREFIX}SERVICE": self.service, f"{PREFIX}OTLP": self.otlp or "", f"{PREFIX}LOG_FORMAT": self.log_format}

    def begin(self, part: str, level: int = logging.INFO) -> None:
        """`part`: of the service, as policy[0]; in each JSON line, and the name under which spans are sent."""
        set_up_logging(level, self.log_format, service=self.service, part=part)
        SPANS.send_to(self.otlp, self.service, part)


def observed() -> Observed:
    """Of this process, from its environment; nothing is sent where it says nothing."""
    read = os.environ.get
    form = cast("Literal['text', 'json']", read(f"{PREFIX}LOG_FORMAT", "text"))
    return Observed(read(f"{PREFIX}SERVICE", ""), read(f"{PREFIX}OTLP") or None, form)
