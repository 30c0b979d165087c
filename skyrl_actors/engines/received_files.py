"""Files of weights that an engine received from the object store."""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.storage.files import remove
from skyrl_actors.storage.private_folders import make_folder

Files = Mapping[str, NDArray[np.uint8]]  # contents by name; a single file has the name ""
LOCK = ".receiving"


def write(target: Path, files: Files) -> None:
    """Write one file or a folder of files, unless `target` exists.

    The engines of a host receive the same files at the same time, and one of them writes.
    """
    make_folder(target.parent)
    with (target.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        staging = target.with_name(f".{target.name}.{os.getpid()}.partial")
        for left in target.parent.glob(f".{target.name}.*.partial"):  # by a process that was killed
            remove(left)
        try:
            _write(staging, files)
            staging.rename(target)
        finally:
            remove(staging)  # of a write that failed


def _write(staging: Path, files: Files) -> None:
    if "" in files:
        staging.write_bytes(files[""].data)
        return
    staging.mkdir()
    for name, content in files.items():
        (staging / Path(name).name).write_bytes(content.data)
