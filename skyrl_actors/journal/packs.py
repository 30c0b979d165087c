"""Store payloads and results in files. The records of one commit form one pack.

A pack is named by the SHA-256 of its content. It is written under another name, fsynced and
renamed, and its folder is fsynced. So it is complete or absent, and never changes.
"""

import hashlib
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import RawIOBase
from pathlib import Path

from skyrl_actors.journal.entries import Blob
from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.storage.files import fsync
from skyrl_actors.storage.objects import Objects

log = logging.getLogger(__name__)
PARTIAL = ".partial"
PACKS = "packs"


class Pack:
    """The records of one pack file."""

    def __init__(self, records: Sequence[bytes]):
        self.records = records
        self._digests = [hashlib.sha256(record).hexdigest() for record in records]
        # A large payload is alone in its pack and is hashed once.
        self.name = self._digests[0] if len(records) == 1 else _digest_of(records)

    def blobs(self) -> Iterator[Blob]:
        offset = 0
        for record, digest in zip(self.records, self._digests, strict=True):
            yield Blob(pack=self.name, offset=offset, length=len(record), digest=digest)
            offset += len(record)


def _digest_of(records: Sequence[bytes]) -> str:
    whole = hashlib.sha256()
    for record in records:
        whole.update(record)
    return whole.hexdigest()


class PackStore:
    """The folder of pack files, and their copies in a mirror if there is one."""

    def __init__(self, folder: Path, mirror: Objects | None = None):
        self.folder = folder
        self.mirror = mirror
        self._left: set[str] = set()

    def write(self, pack: Pack) -> None:
        """Write a pack durably. On OSError it counts as absent."""
        content = b"".join(pack.records)
        self._write(pack.name, content)
        if self.mirror is not None:
            self.mirror.put(f"{PACKS}/{pack.name}", content)

    def _write(self, name: str, content: bytes) -> None:
        target = f"{self.folder}/{name}"
        staging = f"{target}.{uuid.uuid4().hex}{PARTIAL}"  # others may fetch the same pack
        with ExitStack() as undo:
            undo.callback(Path(staging).unlink, missing_ok=True)
            with open(staging, "wb", buffering=0) as stream:
                _write_all(stream, content)
                os.fsync(stream.fileno())
            os.replace(staging, target)
            undo.pop_all()
        fsync(self.folder)

    def read(self, blob: Blob) -> bytes:
        """Read one record. Raises Corrupt when its file is missing or changed."""
        try:
            return self._read(blob)
        except Corrupt:
            if not self.fetch(blob.pack):
                raise
            return self._read(blob)

    def _read(self, blob: Blob) -> bytes:
        path = self.folder / blob.pack
        try:
            with path.open("rb") as stream:
                stream.seek(blob.offset)
                content = stream.read(blob.length)
        except FileNotFoundError:
            raise Corrupt(f"{path} is missing") from None
        if hashlib.sha256(content).hexdigest() != blob.digest:
            raise Corrupt(
                f"{path} was changed: the digest of {blob.length} bytes at {blob.offset} "
                "differs from the written one"
            )
        return content

    def fetch(self, name: str) -> bool:
        """Fetch a pack from the mirror. Return whether it is there."""
        content = None if self.mirror is None else self.mirror.get(f"{PACKS}/{name}")
        if content is None:
            return False
        self._write(name, content)
        return True

    def held(self, places: Mapping[str, Blob]) -> dict[str, Blob]:
        """Return those of these records whose packs are there and long enough."""
        sizes: dict[str, int] = {}
        for pack in {place.pack for place in places.values()}:
            file = self.folder / pack
            if file.exists() or self.fetch(pack):
                sizes[pack] = file.stat().st_size
        return {
            name: place
            for name, place in places.items()
            if place.offset + place.length <= sizes.get(place.pack, -1)
        }

    def names(self) -> list[str]:
        there = [] if self.mirror is None else self.mirror.names(PACKS)
        return sorted({*os.listdir(self.folder), *there})

    def remove(self, names: Iterable[str]) -> int:
        """Remove packs that no row refers to, and return the freed bytes."""
        freed, names = 0, list(names)
        self._remove_mirrored(names)
        for name in names:
            file = self.folder / name
            try:
                freed += file.stat().st_size
                file.unlink()
            except FileNotFoundError:
                continue
        return freed

    def _remove_mirrored(self, names: Sequence[str]) -> None:
        """Remove copies. Those that the mirror does not remove now are removed the next time."""
        if self.mirror is None:
            return
        self._left.update(names)
        if not self._left:
            return
        try:
            self.mirror.remove_files([f"{PACKS}/{name}" for name in sorted(self._left)])
            self._left.clear()
        except OSError as error:
            log.warning("%d packs stay in the mirror for now: %s", len(self._left), error)


def _write_all(stream: RawIOBase, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[stream.write(left) :]
