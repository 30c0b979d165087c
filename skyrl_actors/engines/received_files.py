"""Files of weights that an engine received from the object store."""

import os
import shutil
from pathlib import Path

from skyrl_actors.storage.private_folders import make_folder


def write(target: Path, files: dict[str, bytes]) -> None:
    """Write one file (its key is "") or a folder of files, unless `target` exists."""
    if target.exists():
        return
    make_folder(target.parent)
    staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
    if "" in files:
        staging.write_bytes(files[""])
    else:
        staging.mkdir()
        for name, content in files.items():
            (staging / Path(name).name).write_bytes(content)
    staging.rename(target)


def remove(target: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
