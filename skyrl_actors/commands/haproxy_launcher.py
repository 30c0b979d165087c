"""The program that Ray Serve starts as HAProxy.

It forks a watcher, then replaces itself with HAProxy.

Serve detects a dead HAProxy by health checks and restarts it after some seconds. The watcher
restarts it at once. The next HAProxy of Serve tells earlier ones to finish, including those that
Serve did not start. This file runs as a script without site-packages: `python -I -S
haproxy_launcher.py HAPROXY ARGUMENT…`.
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
# time for a new manager of Serve to take over after the old one died
HANDOVER_S = float(os.environ.get("SKYRL_ACTORS_HANDOVER_S", "60"))
LIVED_S, SHORT_LIVES = 2.0, 5
CLIENTS = ("frontend http_frontend", "frontend grpc_frontend")
EVERYWHERE = re.compile(r"^( *bind )\*?:(\d)")


def main() -> None:
    """Run as HAProxy. With a config (`-f`), first correct it and fork a watcher."""
    binary, *arguments = sys.argv[1:]
    if "-f" in arguments:
        config = Path(arguments[arguments.index("-f") + 1])
        correct_config(config)
        launch(
            binary,
            [*alone(arguments), *predecessor_options(arguments, config)],
            config,
            os.getppid(),
            0,
        )
    os.execv(binary, [binary, *arguments])


def correct_config(config: Path) -> None:
    """Correct the config that Ray wrote.

    Ray binds HAProxy's statistics to every address. Here they are bound to this machine. The
    sections of CLIENTS keep their address, which is `http.host`. Ray also answers 404 while it does
    not know the application, for example after its own restart. Clients treat 404 as final, but
    retry after 503.
    """
    section, lines = "", list[str]()
    for line in config.read_text().splitlines(keepends=True):
        if line[:1].isalpha():
            section = line.strip()
        lines.append(_mended(section, line))
    config.write_text("".join(lines))


def _mended(section: str, line: str) -> str:
    if "not found. Ping" in line:
        return line.replace("return status 404", "return status 503")
    return line if section in CLIENTS else EVERYWHERE.sub(r"\g<1>127.0.0.1:\2", line)


def alone(arguments: list[str]) -> list[str]:
    """Return the arguments without the options that name earlier processes, which can be dead."""
    kept, skipping = list[str](), ""
    for word in arguments:
        if word.startswith("-"):
            skipping = word if word in ("-sf", "-st", "-x") else ""
        if not skipping:
            kept.append(word)
    return kept


def predecessor_options(arguments: list[str], config: Path) -> list[str]:
    """Return the options that name earlier processes, for `arguments` and this folder.

    The HAProxy recorded in the folder is included.
    """
    named = [word for word in arguments if word.isdigit()]
    socket = arguments[arguments.index("-x") :][:2] if "-x" in arguments else []
    known = _read(config.parent / CURRENT)
    if (
        known
        and known not in named
        and str(config) in _read(Path(f"/proc/{known}/cmdline")).split("\0")
    ):
        named.append(known)
    return [*(["-sf", *named] if named else []), *socket]


def launch(binary: str, arguments: list[str], config: Path, manager: int, short_lives: int) -> None:
    """Replace this process with HAProxy. This function does not return."""
    (config.parent / CURRENT).write_text(str(os.getpid()))
    if hasattr(os, "pidfd_open"):
        _fork_watcher(binary, arguments, config, manager, short_lives)
    os.execv(binary, [binary, *arguments])


def _fork_watcher(
    binary: str, arguments: list[str], config: Path, manager: int, short_lives: int
) -> None:
    """Fork twice, so that the watcher is not a child that HAProxy has to wait for."""
    watched = os.getpid()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    started = time.monotonic()
    if _must_restart(watched, manager, config):
        short_lives = short_lives + 1 if time.monotonic() - started < LIVED_S else 0
        if short_lives < SHORT_LIVES:
            launch(binary, alone(arguments), config, manager, short_lives)
    os._exit(0)


def _must_restart(watched: int, manager: int, config: Path) -> bool:
    """Wait until the process is dead. Return whether it must be restarted."""
    try:
        process = os.pidfd_open(watched)
    except ProcessLookupError:
        return _is_wanted(watched, config)
    with suppress(ProcessLookupError):
        select.select([process, os.pidfd_open(manager)], [], [])
    if _dead(process, 0.0):
        return _is_wanted(watched, config)
    if not _dead(process, HANDOVER_S):
        # a process id could belong to another process by now
        signal.pidfd_send_signal(process, signal.SIGTERM)
    return False


def _dead(process: int, timeout_s: float) -> bool:
    return bool(select.select([process], [], [], timeout_s)[0])


def _is_wanted(watched: int, config: Path) -> bool:
    """Return False if another HAProxy has replaced it or the service is stopping."""
    return _read(config.parent / CURRENT) == str(watched) and not (config.parent / CLOSING).exists()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
