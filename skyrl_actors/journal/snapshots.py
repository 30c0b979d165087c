"""Manage snapshot folders.

The ranks write files into a staging folder, `seal` completes it, and `verify` checks it.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from skyrl_actors import clock
from skyrl_actors.journal.entries import SnapshotTaken
from skyrl_actors.journal.packs import PARTIAL, fsync
from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.storage.objects import Objects

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SNAPSHOTS = "snapshots"


class SnapshotFolders:
    """The folder of snapshots, and their copies in a mirror if there is one.

    `wall` returns seconds since the epoch.
    """

    def __init__(
        self, root: Path, wall: Callable[[], float] = clock.now, mirror: Objects | None = None
    ):
        self.root = root
        self.mirror = mirror
        self._wall = wall

    def stage(self, model_id: str, number: int) -> Path:
        """Create an empty staging folder."""
        # Unique, so that a controller which lost the journal never touches its successor's.
        name = f"{_safe(model_id)}@{number}-{uuid.uuid4().hex[:8]}"
        staging = self.root / f"{name}{PARTIAL}"
        staging.mkdir(mode=0o700)
        return staging

    def seal(self, staging: Path, model_id: str, number: int, step: int) -> SnapshotTaken:
        """Complete the snapshot. On OSError only the staging folder is removed."""
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, staging, ignore_errors=True)
            files = {file.name: _described(file) for file in sorted(staging.iterdir())}
            manifest = staging / MANIFEST
            manifest.write_text(
                json.dumps(
                    {"model_id": model_id, "number": number, "step": step, "files": files}, indent=2
                )
            )
            for file in staging.iterdir():
                fsync(file)
            fsync(staging)
            folder = self.root / staging.name.removesuffix(PARTIAL)
            os.rename(staging, folder)
            fsync(self.root)
            if self.mirror is not None:
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                self.mirror.put_folder(f"{SNAPSHOTS}/{folder.name}", folder, MANIFEST)
            undo.pop_all()
        size = sum(int(entry["bytes"]) for entry in files.values())
        return SnapshotTaken(
            model_id=model_id,
            number=number,
            step=step,
            folder=folder.name,
            num_bytes=size,
            taken_at=self._wall(),
        )

    def verify(self, snapshot: SnapshotTaken) -> Path:
        """Return the folder. Raises Corrupt when a file is missing or changed.

        Raises OSError when the mirror does not answer.
        """
        try:
            return self._verify(snapshot)
        except Corrupt:
            if not self.fetch(snapshot.folder):
                raise
            return self._verify(snapshot)

    def _verify(self, snapshot: SnapshotTaken) -> Path:
        folder = self.root / snapshot.folder
        try:
            files = json.loads((folder / MANIFEST).read_text())["files"]
            for name, wanted in files.items():
                if _described(folder / name) != wanted:
                    raise Corrupt(f"snapshot file {folder / name} was changed")
        except (OSError, ValueError, KeyError) as error:
            raise Corrupt(f"snapshot {folder} cannot be read: {error}") from None
        return folder

    def fetch(self, name: str) -> bool:
        """Fetch a snapshot from the mirror. Return whether it is there."""
        if self.mirror is None:
            return False
        staging, folder = self.root / f"{name}.{uuid.uuid4().hex}{PARTIAL}", self.root / name
        try:
            if not self.mirror.get_folder(f"{SNAPSHOTS}/{name}", staging, MANIFEST):
                return False
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)
            return True
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def remove(self, name: str) -> int:
        """Remove a folder and return the freed bytes.

        A copy that the mirror does not remove now is removed when the journal is opened again.
        """
        if self.mirror is not None and not name.endswith(PARTIAL):
            try:
                self.mirror.remove([f"{SNAPSHOTS}/{name}"])
            except OSError as error:
                log.warning("a snapshot stays in the mirror: %s", error)
        folder = self.root / name
        freed = sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0
        shutil.rmtree(folder, ignore_errors=True)
        return freed

    def sweep(self, known: set[str]) -> int:
        """Remove folders without a row: of interrupted or dropped snapshots."""
        there = [] if self.mirror is None else self.mirror.names(SNAPSHOTS)
        found = {*(folder.name for folder in self.root.iterdir()), *there}
        return sum(self.remove(name) for name in sorted(found - known))


def _described(file: Path) -> dict[str, int | str]:
    with file.open("rb") as stream:
        return {
            "bytes": file.stat().st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }


def _safe(model_id: str) -> str:
    return model_id.replace(":", "_")
