"""Read the log tails of dead ranks and the stacks of hanging ranks."""

import asyncio
import subprocess
import sys
from pathlib import Path

from skyrl_actors import remote
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.errors import InternalError

TAIL_LINES = 15
STACKS_TIMEOUT_S = 3.0


async def log_tail(group: ActorGroup) -> str:
    """Return the last log lines of the ranks that ran on this machine."""
    return await asyncio.to_thread(_tails, dict(zip(group.names, group.log_files, strict=False)))


def _tails(files: dict[str, str]) -> str:
    parts: list[str] = []
    for name, file in files.items():
        try:
            lines = Path(file).read_text(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            continue
        parts.append("\n".join([f"last lines of {name} ({file}):", *lines]))
    return "\n".join(parts)


async def stacks_of(group: ActorGroup) -> str:
    """Return the Python stacks of every rank.

    A rank reports its own stacks. If it does not answer, py-spy reads them from outside.
    """
    parts: list[str] = []
    for name, actor, pid in zip(group.names, group.actors, group.pids, strict=False):
        try:
            (text,) = await remote.gather(
                [actor.stacks.remote()], [name], "stacks", STACKS_TIMEOUT_S
            )
        except InternalError:
            text = await asyncio.to_thread(_py_spy_stacks, pid)
        parts.append(f"{name} (process {pid}):\n{text}")
    return "\n".join(parts)


def _py_spy_stacks(pid: int) -> str:
    command = [
        str(Path(sys.executable).with_name("py-spy")),
        "dump",
        "--pid",
        str(pid),
        "--nonblocking",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stacks: {error})"
    return done.stdout or f"(no stacks: {done.stderr.strip()})"
