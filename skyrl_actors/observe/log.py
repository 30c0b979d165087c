"""Set up the logging of a process: text for people, or JSON for log collectors.

JSON lines contain the ids of the request and the model that the current task works on.
"""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The default is never modified: `named` replaces the dict.
_WORKS_ON: ContextVar[dict[str, str]] = ContextVar("works_on", default={})  # noqa: B039


def set_up_logging(
    level: int = logging.INFO, form: Literal["text", "json"] = "text", **fixed: str
) -> None:
    """Configure the logger of this package. Each JSON line contains the fields of `fixed`."""
    root = logging.getLogger("skyrl_actors")
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
        root.setLevel(level)
        root.propagate = False
    for handler in root.handlers:
        handler.setFormatter(Json(fixed) if form == "json" else logging.Formatter(FORMAT))


def named(request_id: str, model_id: str | None = None) -> None:
    """Set the ids that the following log lines of the current task contain."""
    _WORKS_ON.set(
        {"request_id": request_id} | ({"model_id": model_id} if model_id is not None else {})
    )


class Json(logging.Formatter):
    """Formats each record as one line with a JSON object."""

    def __init__(self, fixed: dict[str, str]):
        super().__init__()
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fixed,
            **_WORKS_ON.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
