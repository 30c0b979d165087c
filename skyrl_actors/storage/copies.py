"""Copies of files with a manifest: sizes and SHA-256 digests, by which a copy can be checked."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.files import fsync, write_durably

MANIFEST = "backup.json"
FORMAT = 1
JOURNAL, CHECKPOINTS = "journal", "checkpoints"  # the folders of a copy
_PART = re.compile(rf"{JOURNAL}(_[0-9]+)?|{CHECKPOINTS}")
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A copied file: its size, and the SHA-256 of its content."""

    num_bytes: int
    digest: str


def journal_part(number: int) -> str:
    """Return the folder of a copy that has the journal of a shard. Numbers begin with 1."""
    return JOURNAL if number == 1 else f"{JOURNAL}_{number}"


def copied(source: Path, target: Path, previous: Path | None = None) -> FileCopy:
    """Copy a file durably. Raises OSError.

    `previous`: an older copy; if its content is the same, it is linked where that is possible.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if previous is not None and previous.is_file():
        found = described(source)
        if described(previous) == found:
            with suppress(OSError):  # as on another disk
                os.link(previous, target)
                return found
    whole, size = hashlib.sha256(), 0
    # Others must not read a secret before its mode is set.
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with source.open("rb") as reading, os.fdopen(descriptor, "wb") as writing:
        while content := reading.read(CHUNK_BYTES):
            whole.update(content)
            writing.write(content)
            size += len(content)
        writing.flush()
        os.fsync(writing.fileno())
    shutil.copystat(source, target)
    return FileCopy(size, whole.hexdigest())


def described(file: Path) -> FileCopy:
    """Return size and digest of a file. Raises OSError."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileCopy(file.stat().st_size, digest)


def write_manifest(folder: Path, files: Mapping[str, FileCopy], about: Mapping[str, Any]) -> None:
    """Write the manifest, which completes a copy. `about` is kept with it."""
    for place in {(folder / name).parent for name in files}:
        fsync(place)
    listed = {name: [copy.num_bytes, copy.digest] for name, copy in sorted(files.items())}
    write_durably(
        folder / MANIFEST, json.dumps({"format": FORMAT, **about, "files": listed}, indent=1)
    )


def read_manifest(folder: Path) -> tuple[dict[str, FileCopy], dict[str, Any]]:
    """Return the files of a copy, and what was kept with them. Raises ConfigError."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        found, files = content.get("format"), content.pop("files")
        copies = {name: FileCopy(int(size), str(digest)) for name, (size, digest) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder} is no complete backup: {error!r}") from None
    if found != FORMAT:
        raise ConfigError(f"{folder} is a backup of format {found}; this version reads {FORMAT}")
    for name in copies:
        parts = PurePosixPath(name).parts
        if not _PART.fullmatch(parts[0]) or ".." in parts or str(PurePosixPath(*parts)) != name:
            raise ConfigError(f"the backup {folder} names a file outside of it: {name[:200]!r}")
    return copies, content


def faults(folder: Path, files: Mapping[str, FileCopy]) -> Iterator[str]:
    """Check each file of a copy, and yield what is wrong."""
    for name, wanted in files.items():
        try:
            found = described(folder / name)
        except OSError as error:
            yield f"{name} cannot be read: {error}"
            continue
        if found != wanted:
            yield f"{name} was changed"
