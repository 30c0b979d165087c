"""Remove checkpoints: deleted and expired ones, and what interrupted writes left.

The service changes nothing of a run meanwhile (`Disk.change`). But a rank may: it saves an expired
checkpoint again, and moves the new one to its place. So an expired one is hidden before it is
looked at for the last time.
"""

import shutil
from pathlib import Path

from skyrl_actors.controller.checkpoint_metadata import CheckpointMetadata
from skyrl_actors.controller.notes import read_json, sweep_abandoned
from skyrl_actors.controller.run_folders import RUN_FILE, RunFolders, checkpoints_in
from skyrl_actors.messages.paths import CHECKPOINT_KINDS
from skyrl_actors.storage.files import PARTIAL, REPLACED
from skyrl_actors.storage.mirror import Mirror

DELETED = ".deleted"


class Removal:
    """Removes checkpoints from the folders of runs, and from their mirror if there is one."""

    def __init__(self, runs: RunFolders, metadata: CheckpointMetadata, mirror: Mirror | None):
        self._runs = runs
        self._metadata = metadata
        self._mirror = mirror

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint. The rename makes it vanish at once, whatever its size."""
        if self._mirror:
            self._mirror.remove(folder)
        shutil.rmtree(_hidden(folder))

    def expired(self) -> list[tuple[str, Path]]:
        """Return run and folder of expired checkpoints, after removing what earlier writes left."""
        found = list[tuple[str, Path]]()
        for run in self._runs.unrecorded():  # a copy was interrupted
            for kind in CHECKPOINT_KINDS:
                sweep_abandoned(run / kind, PARTIAL)
        for run in self._runs.own():
            for left in run.glob(f"*/.*{DELETED}"):  # left by a service that died during a deletion
                shutil.rmtree(left, ignore_errors=True)
            for place in (run, *(run / kind for kind in CHECKPOINT_KINDS)):
                sweep_abandoned(place, PARTIAL)
                sweep_abandoned(place, REPLACED)
            run_id = (read_json(run / RUN_FILE) or {}).get("run_id", run.name)
            found += [
                (run_id, folder)
                for folder in checkpoints_in(run)
                if self._metadata.is_expired(folder)
            ]
        return found

    def remove_expired(self, folder: Path) -> int:
        """Remove a checkpoint if it is expired still. Return the number of removed ones.

        Raises OSError when it cannot be removed now; then it is there as before.
        """
        if not self._metadata.is_expired(folder):
            return 0
        hidden = _hidden(folder)
        try:
            is_expired = self._metadata.is_expired(hidden)
            if is_expired and self._mirror:
                self._mirror.remove(folder)
        except OSError:
            hidden.rename(folder)
            raise
        if is_expired or folder.exists():  # the latter: a rank has replaced it since
            shutil.rmtree(hidden)
        else:
            hidden.rename(folder)
        return int(is_expired)


def _hidden(folder: Path) -> Path:
    """Hide a checkpoint and return its new place, which readers and listings leave out."""
    hidden = folder.with_name(f".{folder.name}{DELETED}")
    shutil.rmtree(hidden, ignore_errors=True)
    return folder.rename(hidden)
