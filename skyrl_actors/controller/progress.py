"""The position of a model's state in the journal (pure, but for its lock)."""

import asyncio
from dataclasses import dataclass, field

from skyrl_actors.config.cluster import JournalConfig

SNAPSHOT_BYTES = 256 * 2**20  # payloads since the last snapshot after which another one is due
COPY_SHARE = 0.05  # most of the time that copies of a model's state may take from its training


@dataclass(slots=True, kw_only=True)
class Progress:
    """The position of a model's state in the journal, and the work since its newest snapshot.

    A task that changes the state holds `lock` until the journal has recorded the change.
    """

    position: int  # the last operation that was applied to the state
    step: int = 0
    suspect: bool = False  # an operation failed, so the ranks may not match the journal
    snapshot: int = -1  # the position of the newest snapshot
    operations: int = 0  # applied since that snapshot
    num_bytes: int = 0  # of the payloads of these operations
    oldest: float | None = None  # loop time of the first of these operations
    no_copy_before: float = 0.0  # loop time, so that copies take at most COPY_SHARE of the time
    writing: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def applied(self, number: int, num_bytes: int, now: float) -> None:
        self.position = number
        self.operations += 1
        self.num_bytes += num_bytes
        self.oldest = now if self.oldest is None else self.oldest

    def copied(self, seconds: float, now: float) -> None:
        """Count the work from zero: a copy of the state took `seconds` and ends now."""
        self.operations, self.num_bytes, self.oldest = 0, 0, None
        self.no_copy_before = now - seconds + seconds / COPY_SHARE

    def snapshot_due(self, config: JournalConfig, now: float) -> bool:
        if self.oldest is None or now < self.no_copy_before:
            return False
        return (
            self.operations >= config.snapshot_operations
            or self.num_bytes >= SNAPSHOT_BYTES
            or now - self.oldest >= config.snapshot_s
        )
