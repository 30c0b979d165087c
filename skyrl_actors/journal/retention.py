"""What may be removed (pure).

A model can be rebuilt at every step that is younger than `retention_s`: of the snapshots that are older, the newest one
stays, with every operation behind it. Among the younger ones only the newest `keep_snapshots` stay: the steps between are
reached by a longer replay. A sampler that can still be asked is younger than anything that is removed.
"""

from collections.abc import Sequence
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


def plan_sweep(policy: Retention, newest_first: Sequence[SnapshotTaken], oldest_sampler: int | None, now: float) -> SweepPlan:
    old = [
        s for s in newest_first
        if now - s.taken_at > policy.retention_s and (oldest_sampler is None or s.number <= oldest_sampler)
    ]  # fmt: skip
    base = old[0] if old else None
    young = [s for s in newest_first if base is None or s.number > base.number]
    drop = (*young[policy.keep_snapshots :], *old[1:])
    return SweepPlan(drop, base.number if base else None)
