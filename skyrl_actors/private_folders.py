"""Folders below places that every user of the machine may write to, such as /tmp and /dev/shm.

Another user can make a folder of a predictable name first, and then exchange what this process
writes there or reads from there. So such a folder is used only when it belongs to this user (or to
root), is no link, and nobody else may write to it.
"""

import os
import stat
from pathlib import Path

from skyrl_actors.messages.errors import ConfigError

RUN_FOLDER = Path(f"/tmp/skyrl-actors-{os.getuid()}")  # short: sockets lie below it, and their paths are limited


def make_folder(path: Path) -> Path:
    """Make it, and the folders above it that are missing, for this user alone. Raises ConfigError when
    another user could exchange one of them."""
    is_shared = False
    for folder in [*reversed(path.absolute().parents), path.absolute()]:
        if not os.path.lexists(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        if is_shared:
            is_another_tmp = folder != path.absolute() and bool(folder.lstat().st_mode & stat.S_ISVTX)
            _check(folder, 0 if is_another_tmp else stat.S_IWOTH)
        is_shared = is_shared or bool(folder.stat().st_mode & stat.S_IWOTH)
    return path


def private_folder(path: Path) -> Path:
    """The same, and no other user may read it either."""
    make_folder(path)
    _check(path, stat.S_IRWXG | stat.S_IRWXO)
    return path


def run_folder() -> Path:
    """What services of this user note about themselves on this machine."""
    return private_folder(RUN_FOLDER)


def is_trusted(path: Path) -> bool:
    """Whether a file or folder that exists was made by this user or by root."""
    return path.lstat().st_uid in (0, os.geteuid())


def _check(folder: Path, forbidden: int) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a folder, and another user may have put it there; remove it")
    if not is_trusted(folder):
        raise ConfigError(f"{folder} belongs to another user (id {status.st_uid}); have it removed, or use another folder")
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{folder} is open to other users (mode {mode:o}); remove it, or close it: chmod 700 {folder}")
