"""Runs in which something was published, so that others can list it without reading everybody's runs."""

import threading
from collections.abc import Callable, Iterable

from skyrl_actors.messages.catalog import RunEntry


class Published:
    """Found once by reading all runs, and noted from then on. What was taken back meanwhile may still be among them."""

    def __init__(self, all_runs: Callable[[], Iterable[RunEntry]]):
        self._all_runs = all_runs
        self._found: set[str] | None = None
        self._reading = threading.Lock()
        self._noted: set[str] = set()
        self._noting = threading.Lock()  # apart: who publishes does not wait for the reading of all runs

    def run_ids(self) -> list[str]:
        with self._reading:
            if self._found is None:
                self._found = {run.run_id for run in self._all_runs() if any(c.public for c in run.checkpoints)}
        with self._noting:
            return sorted(self._found | self._noted)

    def note(self, run_id: str) -> None:
        with self._noting:
            self._noted.add(run_id)
