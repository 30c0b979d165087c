"""State where earlier versions kept it: in the folder in which `serve` was typed."""

from pathlib import Path

from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.state_folder import place_in, plain_name
from skyrl_actors.controller.session_catalog import FOLDER as SESSIONS
from skyrl_actors.journal.opening import MARKER
from skyrl_actors.messages.errors import ConfigError


def refuse_left_behind(config: ClusterConfig, here: Path) -> None:
    """Raise ConfigError if new state would begin while there is some `here`.

    A place that the config names, or that has state already, is not concerned.
    """
    journal, checkpoints = config.journal.folder, config.checkpoint_dir
    if not (journal / MARKER).exists() and _is_default(config, "journal", journal):
        last = plain_name(config.base_model.name.rsplit("/", 1)[-1])
        for old in (here / "journal", here / "journal" / last):
            if (old / MARKER).exists():
                _refuse("journal", old.relative_to(here), journal)
    old = here / "checkpoints"
    begins = not checkpoints.exists() and _is_default(config, "checkpoints", checkpoints)
    if begins and (old / SESSIONS).is_dir():
        _refuse("checkpoints", old.relative_to(here), checkpoints)


def _is_default(config: ClusterConfig, name: str, given: Path) -> bool:
    try:
        return given == place_in(dict(config), name)
    except ValueError:
        return False


def _refuse(what: str, old: Path, new: Path) -> None:
    journal = old if what == "journal" else "…"
    raise ConfigError(
        f"{old} has the {what} of an earlier service, and new ones would begin in {new}; to "
        f"continue the old ones, add journal.folder={journal} checkpoint_dir=checkpoints; if they "
        "belong to another base model, or to begin new ones, move the folder away"
    )
