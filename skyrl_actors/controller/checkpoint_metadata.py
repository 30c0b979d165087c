"""The metadata of checkpoints: expiry, publication, origin and what the client noted."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from skyrl_actors.controller.notes import read_json, write_json
from skyrl_actors.messages.catalog import CheckpointEntry

ABOUT_FILE = "about.json"
LAST_TIME = 253_000_000_000  # in the year 9987; Python has no dates after the year 9999
ABOUT = {field.name for field in fields(CheckpointEntry)} - {
    "run_id",
    "kind",
    "name",
    "time",
    "num_bytes",
}


class CheckpointMetadata:
    """Read and write the file of metadata in the folder of each checkpoint."""

    def __init__(self, wall: Callable[[], float]):
        self._wall = wall

    def read(self, folder: Path) -> dict[str, Any]:
        """Return a checkpoint's metadata. Fields of other versions of this project are left out."""
        content = read_json(folder / ABOUT_FILE) or {}
        about = {name: value for name, value in content.items() if name in ABOUT}
        end = about.get("expires_at")
        if end is not None:
            about["expires_at"] = (
                min(end, LAST_TIME) if isinstance(end, int | float) and end == end else None
            )
        return about

    def write(self, folder: Path, **changes: Any) -> None:
        """Change these fields and keep the others."""
        write_json(folder / ABOUT_FILE, self.read(folder) | changes)

    def end_of(self, ttl_seconds: int | None) -> float | None:
        """Return when a checkpoint expires that lives this long from now on."""
        return None if ttl_seconds is None else min(self._wall() + ttl_seconds, LAST_TIME)

    def is_expired(self, folder: Path) -> bool:
        end = self.read(folder).get("expires_at")
        return end is not None and end <= self._wall()
