"""Small JSON files beside checkpoints: written whole or not at all, and read one by one.

A file that cannot be read is logged once and counts as absent. It affects no other file.
"""

import json
import logging
import shutil
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from skyrl_actors.storage.files import PARTIAL, write_durably

log = logging.getLogger(__name__)
UNREADABLE = (OSError, ValueError, TypeError, KeyError)
ABANDONED_S = 24 * 3600.0  # no write of a file takes this long


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object durably, replacing the file at once."""
    write_durably(file, json.dumps(content, indent=2))


def read_json(file: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None when there is no such file or it cannot be read."""
    try:
        content: Any = json.loads(file.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return cast(dict[str, Any], content)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        report(str(file), repr(error))
        return None


@lru_cache(maxsize=1000)
def report(what: str, error: str) -> None:
    """Log an unreadable file, once for each file and error.

    Listings read the same files every few seconds.
    """
    log.error("%s cannot be read and is left out: %s", what, error)


def sweep_abandoned(folder: Path, suffix: str = PARTIAL) -> None:
    """Remove old files and folders that interrupted writes left in a folder."""
    for left in folder.glob(f".*{suffix}"):
        try:
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            report(str(left), repr(error))
