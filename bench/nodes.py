"""A Ray cluster of two nodes on this machine: a head without CPUs, and a worker node."""

import os
from collections.abc import Sequence

import psutil

from skyrl_actors.__main__ import use_ray_token
from skyrl_actors.commands import cluster, haproxy
from skyrl_actors.commands.serve import end_ray_session, ray_marks
from skyrl_actors.config.load import load

STORE = f"--object-store-memory={cluster.OBJECT_STORE_BYTES}"
AGENT_PORT = "--dashboard-agent-listen-port=52370"  # the head uses the default one


class TwoNodes:
    """Two nodes for the service of this config, which joins them when it starts."""

    def __init__(self, config: str, overrides: Sequence[str]):
        use_ray_token(create=True)
        self._environment = haproxy.environment(load(config, overrides))
        self._node: list[psutil.Process] = []

    def start(self) -> None:
        self._ray(
            "start",
            "--head",
            "--disable-usage-stats",
            "--include-dashboard=false",
            "--num-cpus=0",
            STORE,
        )
        self.start_node()

    def start_node(self) -> None:
        before = raylets()
        cpus = max(os.cpu_count() or 1, 2)
        self._ray(
            "start", f"--address={cluster.ray_address()}", f"--num-cpus={cpus}", STORE, AGENT_PORT
        )
        (self._node,) = ([process] for pid, process in raylets().items() if pid not in before)

    def kill_node(self) -> int:
        """Kill all processes of the node at once, and restart it.

        Return the number of processes.
        """
        family = [
            process
            for raylet in self._node
            if raylet.is_running()
            for process in (raylet, *raylet.children(recursive=True))
        ]
        for process in family:
            if process.is_running():
                process.kill()
        self.start_node()
        return len(family)

    def end(self) -> None:
        end_ray_session(ray_marks())
        cluster.forget_ray_address()

    def _ray(self, *arguments: str) -> None:
        done = cluster.ray_command(*arguments, environment=self._environment)
        if done.returncode:
            raise SystemExit(f"ray {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


def raylets() -> dict[int, psutil.Process]:
    return {
        process.pid: process
        for process in psutil.process_iter(["name"])
        if process.info["name"] == "raylet"
    }
