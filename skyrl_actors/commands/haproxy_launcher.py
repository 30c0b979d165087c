"""What Ray Serve starts in HAProxy's place: it becomes HAProxy, and leaves a process behind that watches it.

Serve notices a dead HAProxy by its health checks and makes it anew in some seconds; until then this one starts it again at
once. Serve's next HAProxy tells the earlier ones to finish, also those that Serve does not know. Run by itself, without
site-packages: `python -I -S haproxy_launcher.py HAPROXY ARGUMENT…`.
"""

import os
import re
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

CURRENT, CLOSING = "current.pid", "closing"
HANDOVER_S = float(
    os.environ.get("SKYRL_ACTORS_HANDOVER_S", "60")
)  # Serve's manager died: its next one takes over, or nobody does
LIVED_S, SHORT_LIVES = 2.0, 5


def main() -> None:
    binary, *arguments = sys.argv[1:]
    if "-f" in arguments:
        config = Path(arguments[arguments.index("-f") + 1])
        mend(config)
        launch(binary, [*alone(arguments), *predecessors(arguments, config)], config, os.getppid(), 0)
    os.execv(binary, [binary, *arguments])


def mend(config: Path) -> None:
    """Ray's template binds HAProxy's statistics to every address; here they are for this machine only. And it answers 404
    while it does not know the application, as after its own restart: to a client that is final, and 503 is what it repeats."""
    text = re.sub(r"(?m)^( *bind )\*?:(\d)", r"\g<1>127.0.0.1:\2", config.read_text())
    lines = text.splitlines(keepends=True)
    config.write_text("".join(_mended(line) for line in lines))


def _mended(line: str) -> str:
    return line.replace("return status 404", "return status 503") if "not found. Ping" in line else line


def alone(arguments: list[str]) -> list[str]:
    """Without the options that name earlier processes: they may be dead."""
    kept, skipping = [], ""
    for word in arguments:
        if word.startswith("-"):
            skipping = word if word in ("-sf", "-st", "-x") else ""
        if not skipping:
            kept.append(word)
    return kept


def predecessors(arguments: list[str], config: Path) -> list[str]:
    """The options of `arguments` that name them, and the HAProxy that this folder knows of besides."""
    named = [word for word in arguments if word.isdigit()]
    socket = arguments[arguments.index("-x") :][:2] if "-x" in arguments else []
    known = _read(config.parent / CURRENT)
    if known and known not in named and str(config) in _read(Path(f"/proc/{known}/cmdline")).split("\0"):
        named.append(known)
    return [*(["-sf", *named] if named else []), *socket]


def launch(binary: str, arguments: list[str], config: Path, manager: int, short_lives: int) -> None:
    """Become HAProxy. Does not return."""
    (config.parent / CURRENT).write_text(str(os.getpid()))
    if hasattr(os, "pidfd_open"):
        _fork_watcher(binary, arguments, config, manager, short_lives)
    os.execv(binary, [binary, *arguments])


def _fork_watcher(binary: str, arguments: list[str], config: Path, manager: int, short_lives: int) -> None:
    """Twice, so that it is nobody's child that HAProxy would have to wait for."""
    watched = os.getpid()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    started = time.monotonic()
    if _must_go_on(watched, manager, config):
        short_lives = short_lives + 1 if time.monotonic() - started < LIVED_S else 0
        if short_lives < SHORT_LIVES:
            launch(binary, alone(arguments), config, manager, short_lives)
    os._exit(0)


def _must_go_on(watched: int, manager: int, config: Path) -> bool:
    """Returns when that process is dead: whether another has to take its place."""
    try:
        process = os.pidfd_open(watched)
    except ProcessLookupError:
        return _is_wanted(watched, config)
    with suppress(ProcessLookupError):
        select.select([process, os.pidfd_open(manager)], [], [])
    if _dead(process, 0.0):
        return _is_wanted(watched, config)
    if not _dead(process, HANDOVER_S):
        signal.pidfd_send_signal(process, signal.SIGTERM)  # not by its number, which another process may have by now
    return False


def _dead(process: int, timeout_s: float) -> bool:
    return bool(select.select([process], [], [], timeout_s)[0])


def _is_wanted(watched: int, config: Path) -> bool:
    """Not if another has followed it, or the service ends."""
    return _read(config.parent / CURRENT) == str(watched) and not (config.parent / CLOSING).exists()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
