"""Decide which snapshots and operations may be removed (pure).

A model can be rebuilt at every step younger than `retention_s`. So the newest of the older
snapshots is kept, with every operation after it. Of the younger snapshots only the newest
`keep_snapshots` are kept. The steps between them need a longer replay.

Two kinds are kept in addition. One is the newest snapshot older than every open sampler, so that
the sampler's version can be rebuilt. The others are those after a load (`pinned`), because the
loaded files may have changed.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from skyrl_actors.journal.entries import SnapshotTaken

KEEP_SNAPSHOTS = 3  # of each model; an older one is used if a newer one is damaged


@dataclass(frozen=True, slots=True)
class Retention:
    """How long steps stay available, and how many younger snapshots are kept."""

    retention_s: float
    keep_snapshots: int


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep removes of one model."""

    drop: tuple[SnapshotTaken, ...] = ()
    forget_upto: int | None = None  # payloads and results of operations up to this number


def plan_sweep(
    policy: Retention,
    newest_first: Sequence[SnapshotTaken],
    oldest_sampler: int | None,
    pinned: Set[int],
    now: float,
) -> SweepPlan:
    """Return the snapshots to drop, and the operations whose payloads may be removed."""
    old = [
        s
        for s in newest_first
        if now - s.taken_at > policy.retention_s
        and (oldest_sampler is None or s.number <= oldest_sampler)
    ]
    base = old[0] if old else None
    young = [s for s in newest_first if base is None or s.number > base.number]
    of_sampler = next(
        (
            s.number
            for s in newest_first
            if oldest_sampler is not None and s.number <= oldest_sampler
        ),
        None,
    )
    thinned = [
        s
        for s in young[policy.keep_snapshots :]
        if s.number not in pinned and s.number != of_sampler
    ]
    drop = (*thinned, *old[1:])
    return SweepPlan(drop, base.number if base else None)
