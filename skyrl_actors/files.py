"""Files that must be on the disk."""

import os
import uuid
from pathlib import Path

PARTIAL = ".partial"


def fsync(path: Path) -> None:
    """A file's content, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(file: Path, text: str) -> None:
    """Replace a file's content: it is the old one or the new one, also after a power cut, and one of
    several writers wins. Raises OSError."""
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
