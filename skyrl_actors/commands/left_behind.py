"""A journal where earlier versions kept it: in the folder in which `serve` was typed."""

from pathlib import Path

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.state_folder import plain_name, state_folder
from skyrl_actors.journal.opening import MARKER
from skyrl_actors.messages.errors import ConfigError


def refuse_left_behind(config: ClusterConfig, here: Path) -> None:
    """Raise ConfigError if a new journal would begin while one of this model is `here`.

    A service whose config names its folder, or that has a journal already, is not concerned.
    """
    folder = config.journal.folder
    model = None if config.base_models else config.base_model.name
    if folder != state_folder(config.name, model) / "journal" or (folder / MARKER).exists():
        return
    last = plain_name(config.base_model.name.rsplit("/", 1)[-1])
    for old in (here / "journal", here / "journal" / last):
        if (old / MARKER).exists():
            shown = old.relative_to(here)
            raise ConfigError(
                f"{shown} has the journal of an earlier service, and a new one would begin in "
                f"{folder}; to continue the old one, add journal.folder={shown} "
                "checkpoint_dir=checkpoints; to begin a new one, move the folder away"
            )
