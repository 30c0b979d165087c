"""The journal's interface for the controller: requests, answers and snapshots."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from skyrl_actors.journal.entries import Entry, JournalState, Operation, SnapshotTaken
from skyrl_actors.messages.keys import AuditEntry
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Result
from skyrl_actors.messages.usage import Usage
from skyrl_actors.messages.weights import SamplerWeights


class Journal(Protocol):
    """A durable record of requests, answers and snapshots. One process writes it."""

    async def open(self, holder: str, wait: bool = False) -> JournalState:
        """Open the journal for this process.

        Raises ConfigError when another process holds it, and names that process; with `wait` it
        returns when that process is gone. Raises ConfigError also when it is not a journal of this
        project, or cannot be read or written.
        """
        ...

    async def write(self, *entries: Entry) -> None:
        """Write entries durably: all or none, in the order of the calls.

        Raises Unavailable, or InvalidRequest for entries that can never be written.
        """
        ...

    @property
    def trouble(self) -> str | None:
        """Why the last write failed, or that a write is slow; None otherwise."""
        ...

    @property
    def lost(self) -> str | None:
        """Why the journal must be opened again: its database lost confirmed commits. Else None."""
        ...

    @property
    def deposed(self) -> str | None:
        """Why this process must end: another one has opened the journal since. Else None."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether another process may have opened the journal: the database does not answer."""
        ...

    @property
    def ended_silent(self) -> bool:
        """Whether it was taken from a process that may live on: that one did not react."""
        ...

    async def request(self, operation: Operation) -> Request:
        """Read a request. Raises Corrupt when its file is missing or changed."""
        ...

    async def result(self, operation: Operation) -> Result: ...

    async def find(self, request_id: str) -> Operation | None: ...

    async def operations(self, model_id: str, after: int, upto: int) -> list[Operation]:
        """Return a model's operations with after < number <= upto, in order."""
        ...

    async def trimmed(self, model_id: str) -> int:
        """Return the number up to which operations of this model may have been removed.

        0: none was removed. The model's creation is never removed.
        """
        ...

    async def newest_answered(self, stream: str, before: int, limit: int) -> list[Operation]:
        """Return a stream's newest `limit` answered operations below `before`, in order.

        Only operations with a sequence number are included.
        """
        ...

    async def snapshots(self, model_id: str) -> list[SnapshotTaken]:
        """Return a model's snapshots, newest first."""
        ...

    async def was_unloaded(self, model_id: str) -> bool:
        """Return whether a model of an open session was unloaded."""
        ...

    async def retired_weights(self) -> list[SamplerWeights]:
        """Return the weights of retired samplers, until a sweep removes their rows."""
        ...

    async def stage_snapshot(self, model_id: str, number: int) -> Path:
        """Create a folder for the ranks to write into."""
        ...

    async def drop_staging(self, staging: Path) -> None: ...

    async def seal_snapshot(
        self, staging: Path, model_id: str, number: int, step: int
    ) -> SnapshotTaken:
        """Complete a snapshot atomically: manifest with checksums, fsync, rename, row."""
        ...

    async def verified_snapshot(self, snapshot: SnapshotTaken) -> Path:
        """Return a snapshot's folder. Raises Corrupt when a file is missing or changed."""
        ...

    async def audit(
        self, last: int, since: float = 0.0, until: float | None = None
    ) -> list[AuditEntry]:
        """Return the newest acts from `since` to before `until`, oldest first."""
        ...

    async def usage(self, since: float, until: float, owner: str | None = None) -> list[Usage]:
        """Return the usage of hours that begin from `since` to before `until`, oldest first.

        `owner` None: that of all.
        """
        ...

    async def sweep(self, unfreed: Collection[str] = ()) -> int:
        """Remove what retention no longer needs, and return the freed bytes.

        Retired samplers stay whose weights are of the versions `unfreed`.
        """
        ...

    async def close(self) -> None: ...
