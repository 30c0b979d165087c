"""Payloads and results as files. One commit's records make one pack, named by the SHA-256 of its content.

A pack is written under another name, fsynced, renamed, and its folder fsynced: it is whole or absent, and never changed.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import RawIOBase
from pathlib import Path

from skyrl_actors.files import fsync
from skyrl_actors.journal.entries import Blob
from skyrl_actors.messages.errors import Corrupt

PARTIAL = ".partial"


class Pack:
    """Records on their way into one file."""

    def __init__(self, records: Sequence[bytes]):
        self.records = records
        whole = hashlib.sha256()
        for record in records:
            whole.update(record)
        self.name = whole.hexdigest()

    def blobs(self) -> Iterator[Blob]:
        offset = 0
        for record in self.records:
            yield Blob(self.name, offset, len(record), hashlib.sha256(record).hexdigest())
            offset += len(record)


class PackStore:
    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, pack: Pack) -> None:
        """Durable when this returns. Raises OSError, then no pack was added."""
        target = f"{self.folder}/{pack.name}"
        staging = f"{target}{PARTIAL}"
        with ExitStack() as undo:
            undo.callback(Path(staging).unlink, missing_ok=True)
            with open(staging, "wb", buffering=0) as stream:
                _write_all(stream, b"".join(pack.records))
                os.fsync(stream.fileno())
            os.replace(staging, target)
            undo.pop_all()
        fsync(self.folder)

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

    def names(self) -> list[str]:
        return os.listdir(self.folder)

    def remove(self, names: Iterable[str]) -> int:
        """Packs that no row names; returns freed bytes."""
        freed = 0
        for name in names:
            file = self.folder / name
            try:
                freed += file.stat().st_size
                file.unlink()
            except FileNotFoundError:
                continue
        return freed


def _write_all(stream: RawIOBase, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[stream.write(left) :]
