"""What ranks said before they died, and where they are when they hang."""

import asyncio
import subprocess
import sys
from pathlib import Path

from skyrl_actors import remote
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.errors import InternalError

TAIL_LINES = 15
STACKS_TIMEOUT_S = 3.0


async def last_words(group: ActorGroup) -> str:
    """The ends of the ranks' logs, of those that ran on this machine."""
    return await asyncio.to_thread(_tails, dict(zip(group.names, group.log_files, strict=False)))


def _tails(files: dict[str, str]) -> str:
    parts = []
    for name, file in files.items():
        try:
            lines = Path(file).read_text(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            continue
        parts.append("\n".join([f"last lines of {name} ({file}):", *lines]))
    return "\n".join(parts)


async def stacks_of(group: ActorGroup) -> str:
    """Python stacks of every rank: told by the rank itself, or read from outside by py-spy when it can not answer."""
    parts = []
    for name, actor, pid in zip(group.names, group.actors, group.pids, strict=False):
        try:
            (text,) = await remote.gather([actor.stacks.remote()], [name], "stacks", STACKS_TIMEOUT_S)
        except InternalError:
            text = await asyncio.to_thread(_spied, pid)
        parts.append(f"{name} (process {pid}):\n{text}")
    return "\n".join(parts)


def _spied(pid: int) -> str:
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid), "--nonblocking"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stacks: {error})"
    return done.stdout or f"(no stacks: {done.stderr.strip()})"
