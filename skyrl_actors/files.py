"""Files that must be on the disk."""

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """A file's content, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
