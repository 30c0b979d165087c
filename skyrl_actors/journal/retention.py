"""What may be removed (pure).

A model can be rebuilt at every step that is younger than `retention_s`: of the snapshots that are older, the newest one
stays, with every operation behind it. Among the younger ones only the newest `keep_snapshots` stay: the steps between are
reached by a longer replay. Two kinds stay beside them: the newest one that is older than every sampler that can still be
asked, so that it can be frozen again; and those behind a load (`pinned`), as files that were loaded may have changed.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from skyrl_actors.journal.entries import SnapshotTaken


@dataclass(frozen=True, slots=True)
class Retention:
    retention_s: float
    keep_snapshots: int


@dataclass(frozen=True, slots=True)
class SweepPlan:
    drop: tuple[SnapshotTaken, ...] = ()
    forget_upto: int | None = None  # payloads and results of operations up to this number


def plan_sweep(
    policy: Retention, newest_first: Sequence[SnapshotTaken], oldest_sampler: int | None, pinned: Set[int], now: float
) -> SweepPlan:
    old = [
        s for s in newest_first
        if now - s.taken_at > policy.retention_s and (oldest_sampler is None or s.number <= oldest_sampler)
    ]  # fmt: skip
    base = old[0] if old else None
    young = [s for s in newest_first if base is None or s.number > base.number]
    of_sampler = next((s.number for s in newest_first if oldest_sampler is not None and s.number <= oldest_sampler), None)
    thinned = [s for s in young[policy.keep_snapshots :] if s.number not in pinned and s.number != of_sampler]
    drop = (*thinned, *old[1:])
    return SweepPlan(drop, base.number if base else None)
