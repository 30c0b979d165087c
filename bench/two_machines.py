"""Two machines of a Ray cluster on this one: the second is a network namespace of Linux.

Its link can be cut, which ends no connection: to others the machine has vanished. Needs root and
`ip` (iproute2).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from skyrl_actors.commands import cluster

NAMESPACE, LINK = "skyrl-bench", "skyrl-bench0"
INSIDE = ("ip", "netns", "exec", NAMESPACE)  # before commands on the second machine
HEAD, OTHER = "10.213.7.1", "10.213.7.2"
PORT = 6399
STORE = f"--object-store-memory={cluster.OBJECT_STORE_BYTES}"


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def _ray(before: tuple[str, ...], *arguments: str) -> None:
    command = [*before, sys.executable, "-m", "ray.scripts.scripts", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


@contextmanager
def network() -> Iterator[None]:
    """Make the network namespace of the second machine."""
    _remove_network()
    try:
        _make_network()
        yield
    finally:
        _remove_network()


@contextmanager
def two_machines() -> Iterator[None]:
    """Start Ray on both. Commands in this environment join it. The second has no CPU slots."""
    with network(), ExitStack() as undo:
        undo.callback(_ray, (), "stop", "--force")
        undo.callback(os.environ.pop, "RAY_ADDRESS", None)
        _ray((), "start", "--head", f"--node-ip-address={HEAD}", f"--port={PORT}", "--num-cpus=2",
             "--include-dashboard=false", "--disable-usage-stats", STORE)  # fmt: skip
        _ray(INSIDE, "start", f"--address={HEAD}:{PORT}", f"--node-ip-address={OTHER}",
             "--num-cpus=0", STORE)  # fmt: skip
        os.environ["RAY_ADDRESS"] = f"{HEAD}:{PORT}"
        yield


def _make_network() -> None:
    _ip("netns", "add", NAMESPACE)
    _ip("link", "add", LINK, "type", "veth", "peer", "name", "there", "netns", NAMESPACE)
    _ip("addr", "add", f"{HEAD}/30", "dev", LINK)
    _ip("link", "set", LINK, "up")
    _ip("-n", NAMESPACE, "addr", "add", f"{OTHER}/30", "dev", "there")
    for device in ("there", "lo"):
        _ip("-n", NAMESPACE, "link", "set", device, "up")


def _remove_network() -> None:
    _ip("link", "del", LINK, check=False)
    _ip("netns", "del", NAMESPACE, check=False)


def cut() -> None:
    """Let the second machine vanish. The first one still reaches itself."""
    _ip("link", "set", LINK, "down")
    _ip("addr", "add", f"{HEAD}/32", "dev", "lo")


def reconnect() -> None:
    """Let the second machine return."""
    _ip("addr", "del", f"{HEAD}/32", "dev", "lo")
    _ip("link", "set", LINK, "up")


def is_there(pid: int) -> bool:
    """Return whether a process is on the second machine."""
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
