"""Training runs with published checkpoints.

Other owners list these without reading all runs. Each has an empty file in one folder, which shards
share.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from skyrl_actors.messages.catalog import RunEntry

FOLDER = ".published"
WHOLE = ".whole"  # this file is written last, when all runs were read


class Published:
    """The ids of training runs that have, or had, published checkpoints.

    The first call reads all runs; later publications are added.
    """

    def __init__(self, root: Path, all_runs: Callable[[], Iterable[RunEntry]]):
        self._folder = root / FOLDER
        self._all_runs = all_runs
        self._reading = threading.Lock()

    def run_ids(self) -> list[str]:
        """Return the ids, sorted. Published checkpoints may have been withdrawn since."""
        with self._reading:
            if not (self._folder / WHOLE).exists():
                for run in self._all_runs():
                    if any(checkpoint.public for checkpoint in run.checkpoints):
                        self.note(run.run_id)
                self._put(WHOLE)
        return sorted(file.name for file in self._folder.iterdir() if file.name != WHOLE)

    def note(self, run_id: str) -> None:
        """Add a run in which a checkpoint was published or withdrawn."""
        self._put(run_id)

    def forget(self) -> None:
        """Read all runs again, because some were added by other means."""
        (self._folder / WHOLE).unlink(missing_ok=True)

    def _put(self, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).touch()
