"""Copy checkpoints that only the checkpoint folder or only its mirror has to the other place."""

from collections.abc import Callable
from pathlib import Path

from skyrl_actors.controller.checkpoint_metadata import ABOUT_FILE
from skyrl_actors.controller.notes import read_json
from skyrl_actors.controller.run_folders import RUN_FILE, RunFolders, checkpoints_in, keeps_all
from skyrl_actors.messages.errors import Unavailable
from skyrl_actors.storage.mirror import Mirror


class Alignment:
    """What only the mirror or only this machine has. `fetched` is called after a fetch.

    Methods that read or write files raise OSError.
    """

    def __init__(self, runs: RunFolders, mirror: Mirror | None, fetched: Callable[[], None]):
        self.away: str | None = None  # why the two were not compared
        self._runs = runs
        self._mirror = mirror
        self._fetched = fetched
        self._keeps_all = runs.keeps is keeps_all

    def put(self, folder: Path) -> None:
        """Copy a checkpoint to the mirror, if there is one."""
        if self._mirror:
            self._mirror.put(folder)
            run = folder.parent.parent / RUN_FILE
            if run.exists():
                self._mirror.put_file(run)

    def all(self) -> int:
        """Copy checkpoints that only the mirror or only this machine has to the other place.

        Returns the number of checkpoints that were fetched. Only before anything else uses them.
        """
        if self._mirror is None:
            return 0
        count, whole = self._pulled(self._runs.keeps)
        self._put_missing(self._runs.own(), whole)
        return count

    def fetch(self) -> int:
        """Copy what only the mirror has to this machine, while no controller runs."""
        return self._pulled(keeps_all)[0]

    def check_known(self) -> None:
        """Raise Unavailable if what is not here may be on the mirror."""
        if self.away:
            raise Unavailable(
                "this checkpoint or run is not on this machine, and it is not known yet whether "
                f"the mirror has it: {self.away}"
            )

    def reach(self) -> None:
        """Write a file to the mirror."""
        if self._mirror:
            self._mirror.reach()

    def has_runs(self) -> bool:
        """Return whether this machine has training runs."""
        return bool(self._runs.all())

    def lacks_others(self) -> bool:
        """Return whether checkpoints of other shards are not here, which only these fetch."""
        if self._mirror is None or self._keeps_all:
            return False
        here = {folder for run in self._runs.all() for folder in checkpoints_in(run)}
        return not self._mirror.whole(keeps_all) <= here

    def differing(self) -> list[tuple[str, Path]]:
        """Return id and folder of the runs of which one place has more than the other one."""
        assert self._mirror is not None
        there = self._mirror.whole(self._runs.keeps)
        here = {folder for run in self._runs.own() for folder in self._complete(run)}
        found = list[tuple[str, Path]]()
        for run in sorted({folder.parent.parent for folder in there ^ here}):
            self._mirror.pull_file(run / RUN_FILE)
            found.append(((read_json(run / RUN_FILE) or {}).get("run_id", run.name), run))
        return found

    def one(self, run: Path) -> None:
        """Copy what one place lacks of a run. The caller holds the run's lock."""
        _, whole = self._pulled(lambda name: name == run.name, run.name)
        self._put_missing([run], whole)

    def _complete(self, run: Path) -> list[Path]:
        # Without notes it is not complete; it may still have to be encrypted.
        return [folder for folder in checkpoints_in(run) if (folder / ABOUT_FILE).exists()]

    def _put_missing(self, runs: list[Path], whole: set[Path]) -> None:
        for run in runs:
            for folder in self._complete(run):
                if folder not in whole:
                    self.put(folder)

    def _pulled(self, wanted: Callable[[str], bool], below: str = "") -> tuple[int, set[Path]]:
        """Return how many were fetched, and the folders of all that the mirror has."""
        if self._mirror is None:
            return 0, set()
        count, whole = self._mirror.pull(RUN_FILE, wanted, below)
        if count:
            self._fetched()
        return count, whole
