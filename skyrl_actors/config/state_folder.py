"""Where a service without places in its config keeps its state: in a folder of the user.

The place does not depend on the folder in which a command is typed.
"""

import os
import re
from pathlib import Path
from typing import Any

VARIABLE = "XDG_STATE_HOME"  # see the XDG Base Directory Specification
SEVERAL = "several"  # in place of the name of one base model


def state_folder(service: str, base_model: str | None) -> Path:
    """Return the folder of a service and its base model; None = it has several."""
    root = Path(os.environ.get(VARIABLE) or "~/.local/state").expanduser()
    return root / "skyrl-actors" / service / (plain_name(base_model) if base_model else SEVERAL)


def plain_name(base_model: str) -> str:
    """Return the name of a base model as the name of a folder or file."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", base_model).strip("-.") or "model"


def place_in(config: dict[str, Any], name: str) -> Path:
    """Return the place of `name` by the keys of a config that are validated already."""
    if not {"name", "base_model"} <= config.keys():
        return Path(name)  # these have faults, which will be reported
    several = bool(config.get("base_models"))
    return state_folder(config["name"], None if several else config["base_model"].name) / name


def shown_place(name: str) -> str:
    """Return the place as the reference of keys shows it."""
    return f"~/.local/state/skyrl-actors/<name>/<base model>/{name}"
