"""Source packages of the package index, unpacked once in the user's cache.

They have the tests and examples that a wheel leaves out.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "skyrl-actors" / "sources"


def unpacked(name: str, version: str) -> Path:
    """Return the folder of a source package's files."""
    folder = CACHE / f"{name}-{version}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".partial-") as scratch:
            command = ("download", "-q", "--no-deps", "--no-binary", name, "-d", scratch)
            subprocess.run(
                [sys.executable, "-m", "pip", *command, f"{name}=={version}"], check=True
            )
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
            archive.with_suffix("").with_suffix("").rename(folder)
    return folder
