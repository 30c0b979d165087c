"""Measure how long clients wait when the controller's process dies or stands still.

    python -m bench.takeover --rounds 10

One client samples one token after the other. The result has the longest time between two answers
after each fault: with one controller, and with a standby (`restart.standby_controller`).
`--journal-url` is the PostgreSQL database of the journal; with it, processes are also stopped
(SIGSTOP) instead of killed.
"""

import argparse
import os
import re
import signal
import statistics
import threading
import time
from itertools import pairwise
from typing import Any

import tinker

from bench import harness
from skyrl_actors.commands.serve import read_status

SETTLED_S = 6.0  # until the other process waits again
LONGEST_S = 60.0


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
    """Return the process that has the turn."""
    found = re.match(r"process (\d+) on ", read_status(harness.NAME)["process"])
    assert found is not None
    return int(found[1])


def measured(rounds: int, which: signal.Signals) -> list[float]:
    client, waits = Sampling(), []
    while len(client.answers) < 10:
        time.sleep(0.1)
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
    parser.add_argument("--journal-url")
    given = parser.parse_args()
    url = [f"journal.url={given.journal_url}"] if given.journal_url else []
    cases = [("killed", "false", signal.SIGKILL), ("killed", "true", signal.SIGKILL)]
    if url:
        cases.append(("stopped", "true", signal.SIGSTOP))
    found: list[dict[str, Any]] = []
    for fault, standby, which in cases:
        with harness.service("critic=null", f"restart.standby_controller={standby}", *url):
            waits = measured(given.rounds, which)
        found.append(
            {
                "fault": fault,
                "standby": standby == "true",
                "median_s": round(statistics.median(waits), 2),
                "longest_s": round(max(waits), 2),
            }
        )
        print(found[-1], flush=True)
    database = "postgresql" if url else "sqlite"
    harness.emit("takeover", {"rounds": given.rounds, "journal": database, "waits": found})


if __name__ == "__main__":
    main()
