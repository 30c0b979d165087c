"""Payloads and results as files. One commit's records make one pack, named by the SHA-256 of its content.

A pack is written under another name, fsynced, renamed, and its folder fsynced: it is whole or absent, and never changed.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from skyrl_actors.journal.entries import Blob
from skyrl_actors.messages.errors import Corrupt

PARTIAL = ".partial"


class PackStore:
    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, records: Sequence[bytes]) -> list[Blob]:
        """Durable when this returns. Raises OSError, then no pack was added."""
        if not records:
            return []
        whole = hashlib.sha256()
        for record in records:
            whole.update(record)
        name = whole.hexdigest()
        target = self.folder / name
        staging = self.folder / f"{name}{PARTIAL}"
        try:
            with staging.open("wb") as stream:
                stream.writelines(records)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(staging, target)
            fsync(self.folder)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise
        blobs, offset = [], 0
        for record in records:
            blobs.append(Blob(name, offset, len(record), hashlib.sha256(record).hexdigest()))
            offset += len(record)
        return blobs

    def read(self, blob: Blob) -> bytes:
        path = self.folder / blob.pack
        try:
            with path.open("rb") as stream:
                stream.seek(blob.offset)
                content = stream.read(blob.length)
        except FileNotFoundError:
            raise Corrupt(f"{path} is missing") from None
        if hashlib.sha256(content).hexdigest() != blob.digest:
            raise Corrupt(f"{path} was changed: {blob.length} bytes at {blob.offset} do not have the digest that was written")
        return content

    def sweep(self, used: Iterable[str]) -> int:
        """Remove packs that no row names, and what an interrupted write left; returns freed bytes."""
        keep, freed = set(used), 0
        for file in self.folder.iterdir():
            if file.name not in keep:
                freed += file.stat().st_size
                file.unlink()
        return freed


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
