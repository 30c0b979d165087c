"""Write files durably, and remove them."""

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from skyrl_actors.messages.errors import ConfigError

PARTIAL = ".partial"
REPLACED = ".old"  # of a folder that another one has replaced


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, text: str) -> None:
    """Replace a file's content atomically and durably. Raises OSError.

    After a power cut the file has the old content or the new one. Of several writers one wins.
    """
    staging = file.with_name(f".{file.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with staging.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        staging.replace(file)
    except OSError:
        staging.unlink(missing_ok=True)
        raise
    fsync(file.parent)


def check_writable(folder: Path, key: str) -> None:
    """Write and remove a file, and create the folder if needed. Raises ConfigError.

    `key` is the key of the config that names the folder.
    """
    probe = folder / f".{uuid.uuid4().hex}{PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{key}: {folder} cannot be written ({error.strerror}); name a folder that this user "
            "may write to"
        ) from None


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, 0 for what cannot be read or is gone."""
    found = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            found += file.lstat().st_size if not file.is_dir() else 0
    return found


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
