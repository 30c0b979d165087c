"""Find out whether a sampler's checkpoint was deleted or saved again since it was opened."""

from typing import Literal

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.paths import TinkerPath, parse_path

Change = Literal["deleted", "saved again"]


def change_of(folders: CheckpointFolders, sampler: Sampler) -> Change | None:
    """Return how a sampler's checkpoint changed since it was opened. Reads files.

    Returns None for an unchanged checkpoint, and for a sampler without one.
    """
    if sampler.model_path is None:
        return None
    try:
        is_same = folders.is_version(parse_path(sampler.model_path), sampler.weights.version)
    except (NotFound, FileNotFoundError):  # FileNotFoundError: it is being removed
        return "deleted"
    return None if is_same else "saved again"


def is_saved_again(folders: CheckpointFolders, path: TinkerPath, version: str) -> bool:
    """Return whether a checkpoint was saved again since it had this version. Reads files."""
    try:
        return not folders.is_version(path, version)
    except (NotFound, FileNotFoundError):  # it was removed, so there was no other one to read
        return False


def change_text(sampler: Sampler, change: Change) -> str:
    """Return the error message for a sampler whose checkpoint changed."""
    return (
        f"{sampler.model_path} was {change} since sampler {sampler.sampler_id} was opened from it; "
        "create a sampling client of an existing checkpoint"
    )
