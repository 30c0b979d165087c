"""Where a service without places in its config keeps its state: in a folder of the user.

The place does not depend on the folder in which a command is typed.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

VARIABLE = "XDG_STATE_HOME"  # see the XDG Base Directory Specification
SEVERAL = "several-base-models"  # in place of the name of one


def state_folder(service: str, base_model: str) -> Path:
    """Return the folder of a service and what it serves, by `folder_name` or SEVERAL.

    Raises ValueError if the user has no home folder.
    """
    given = Path(os.environ.get(VARIABLE, ""))
    try:
        root = given if given.is_absolute() else Path("~/.local/state").expanduser()
    except RuntimeError:
        raise ValueError(
            f"there is no home folder to keep state in; set the environment variable {VARIABLE}, "
            "or journal.folder and checkpoint_dir"
        ) from None
    return root / "skyrl-actors" / service / base_model


def plain_name(base_model: str) -> str:
    """Return the name of a base model as the name of a folder or file."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", base_model).strip("-.") or "model"


def folder_name(base_model: str, path: Path | None) -> str:
    """Return the name of the folder for a base model, and for the local folder of its files."""
    if path is None:
        return plain_name(base_model.replace("/", "--"))
    mark = hashlib.sha256(str(path.expanduser().absolute()).encode()).hexdigest()[:8]
    return f"{plain_name(base_model)}-{mark}"


def place_in(config: dict[str, Any], name: str) -> Path:
    """Return the place of `name` by the keys of a config that are validated already."""
    if not {"name", "base_model"} <= config.keys():
        return Path(name)  # these have faults, which will be reported
    base = config["base_model"]
    path = getattr(base, "path", None)
    own = SEVERAL if config.get("base_models") else folder_name(base.name, path)
    return state_folder(config["name"], own) / name


def shown_place(name: str) -> str:
    """Return the place as the reference of keys shows it."""
    return f"~/.local/state/skyrl-actors/<name>/<base model>/{name}"
