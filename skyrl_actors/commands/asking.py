"""Calls of a running service from a command, and what operators' commands have in common."""

import asyncio
import getpass
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from skyrl_actors.commands.controllers import running_client
from skyrl_actors.commands.serve import join
from skyrl_actors.controller.calls import ControllerCalls
from skyrl_actors.messages.errors import ConfigError

T = TypeVar("T")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def asked(service: str, call: Callable[[ControllerCalls], Awaitable[T]]) -> T:
    """Make calls of a service's controller. Raises ConfigError if it does not run."""
    join(service)

    async def run() -> Any:
        return await call(running_client(service).calls)

    return asyncio.run(run())


def actor() -> str:
    """Return who runs this command, for the audit log."""
    return f"{getpass.getuser()} on {socket.gethostname()}"


def time_text(at: float | None) -> str | None:
    """Return a time in seconds since the epoch as text."""
    return None if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def seconds_in(text: str) -> float:
    """Return the seconds in a duration such as 30d, 12h, 90m or 45s. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if found is None:
        raise ConfigError(f"{text[:40]!r} is no duration; use for example 30d, 12h, 90m or 45s")
    return float(found[1]) * UNITS[found[2]]
