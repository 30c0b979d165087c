"""Training runs with published checkpoints.

Other owners list these without reading all runs.
"""

import threading
from collections.abc import Callable, Iterable

from skyrl_actors.messages.catalog import RunEntry


class Published:
    """The ids of training runs that have, or had, published checkpoints.

    The first call reads all runs; later publications are added.
    """

    def __init__(self, all_runs: Callable[[], Iterable[RunEntry]]):
        self._all_runs = all_runs
        self._found: set[str] | None = None
        self._reading = threading.Lock()
        self._noted: set[str] = set()
        self._noting = threading.Lock()  # a separate lock: `note` must not wait for that reading

    def run_ids(self) -> list[str]:
        """Return the ids, sorted. Published checkpoints may have been withdrawn since."""
        with self._reading:
            if self._found is None:
                self._found = {
                    run.run_id for run in self._all_runs() if any(c.public for c in run.checkpoints)
                }
        with self._noting:
            return sorted(self._found | self._noted)

    def note(self, run_id: str) -> None:
        """Add a run in which a checkpoint was published or withdrawn."""
        with self._noting:
            self._noted.add(run_id)
