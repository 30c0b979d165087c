"""Create folders in places that every user of the machine may write to.

Examples are /tmp and /dev/shm. Another user can create a folder of a predictable name first, and
then replace the files in it. So a folder is used under three conditions: it is no link, it belongs
to this user or root, and no other user may write to it.
"""

import os
import stat
from pathlib import Path

from skyrl_actors.messages.errors import ConfigError

# Short, because it contains sockets, whose paths are limited in length.
RUN_FOLDER = Path(f"/tmp/skyrl-actors-{os.getuid()}")


def make_folder(path: Path) -> Path:
    """Create the folder and its missing parents for this user alone.

    Raises ConfigError when another user could replace one of them.
    """
    is_shared = False
    for folder in [*reversed(path.absolute().parents), path.absolute()]:
        if not os.path.lexists(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        if is_shared:
            is_another_tmp = folder != path.absolute() and bool(
                folder.lstat().st_mode & stat.S_ISVTX
            )
            _check(folder, 0 if is_another_tmp else stat.S_IWOTH)
        is_shared = is_shared or bool(folder.stat().st_mode & stat.S_IWOTH)
    return path


def private_folder(path: Path) -> Path:
    """Create a folder that no other user may write to or read."""
    make_folder(path)
    _check(path, stat.S_IRWXG | stat.S_IRWXO)
    return path


def run_folder() -> Path:
    """Return the folder for files of this user's services on this machine.

    Ray creates it for HAProxy where other users may read it. Then it is closed.
    """
    make_folder(RUN_FOLDER)
    status = RUN_FOLDER.lstat()
    if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        RUN_FOLDER.chmod(stat.S_IRWXU)
    return private_folder(RUN_FOLDER)


def is_trusted(path: Path) -> bool:
    """Return whether an existing file or folder belongs to this user or to root."""
    return path.lstat().st_uid in (0, os.geteuid())


def _check(folder: Path, forbidden: int) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a folder and may belong to another user; remove it")
    if not is_trusted(folder):
        raise ConfigError(
            f"{folder} belongs to another user (id {status.st_uid}); "
            "have it removed, or use another folder"
        )
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{folder} is open to other users (mode {mode:o}); "
            f"remove it, or close it: chmod 700 {folder}"
        )
