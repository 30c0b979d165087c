"""Is a sampler's checkpoint still the one that it was opened from?"""

from typing import Literal

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.tenants import Sampler
from skyrl_actors.messages.errors import NotFound
from skyrl_actors.messages.paths import parse_path

Change = Literal["deleted", "saved again"]


def change_of(folders: CheckpointFolders, sampler: Sampler) -> Change | None:
    """None while it is, and for samplers of no checkpoint. Reads files."""
    if sampler.model_path is None:
        return None
    try:
        is_same = folders.is_version(parse_path(sampler.model_path), sampler.weights.version)
    except (NotFound, FileNotFoundError):  # the second while it is being removed
        return "deleted"
    return None if is_same else "saved again"


def change_text(sampler: Sampler, change: Change) -> str:
    return (
        f"{sampler.model_path} was {change} since sampler {sampler.sampler_id} was opened from it; "
        "make a sampling client of a checkpoint that exists"
    )
