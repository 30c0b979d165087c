"""The journal as the controller sees it: what was promised, what was answered, and the snapshots between."""

from pathlib import Path
from typing import Protocol

from skyrl_actors.journal.entries import Books, Entry, Operation, SnapshotTaken
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Result


class Journal(Protocol):
    async def open(self, holder: str) -> Books:
        """Take the journal for this process. Raises ConfigError when another holds it (naming that one), when it is not a
        journal of this project, or when it can not be read or written."""
        ...

    async def write(self, *entries: Entry) -> None:
        """Durable when this returns, all together; in the order of the calls. Raises Unavailable, or InvalidRequest
        for entries that can never be written; then nothing was written."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the last write failed, or that one takes long; None when all is well."""
        ...

    @property
    def lost(self) -> str | None:
        """Why it must be opened anew: its database lost what was confirmed. None when it did not."""
        ...

    async def request(self, operation: Operation) -> Request:
        """Raises Corrupt when its file is missing or changed."""
        ...

    async def result(self, operation: Operation) -> Result: ...

    async def find(self, request_id: str) -> Operation | None: ...

    async def operations(self, model_id: str, after: int, upto: int) -> list[Operation]:
        """Of one model, after < number <= upto, in order."""
        ...

    async def trimmed(self, model_id: str) -> int:
        """The number up to which operations of this model may have been removed, but for its creation; 0: none was."""
        ...

    async def remembered(self, stream: str, before: int, limit: int) -> list[Operation]:
        """Of one stream, answered and with a sequence number: the newest `limit` below `before`, in order."""
        ...

    async def snapshots(self, model_id: str) -> list[SnapshotTaken]:
        """Newest first."""
        ...

    async def stage_snapshot(self, model_id: str, number: int) -> Path:
        """A fresh folder for the ranks to write into."""
        ...

    async def drop_staging(self, staging: Path) -> None: ...

    async def seal_snapshot(self, staging: Path, model_id: str, number: int, step: int) -> SnapshotTaken:
        """Manifest with checksums, fsync, rename, row: complete or absent."""
        ...

    async def verified_snapshot(self, snapshot: SnapshotTaken) -> Path:
        """Its folder. Raises Corrupt when a file is missing or changed."""
        ...

    async def sweep(self) -> int:
        """Remove what retention no longer asks for; returns freed bytes."""
        ...

    async def close(self) -> None: ...
