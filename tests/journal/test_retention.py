from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.journal.entries import SnapshotTaken
from skyrl_actors.journal.retention import Retention, plan_sweep

NOW = 1000.0
POLICY = Retention(retention_s=100.0, keep_snapshots=2)


def taken(number: int, age: float) -> SnapshotTaken:
    return SnapshotTaken(
        model_id="m",
        number=number,
        step=number,
        folder=f"m@{number}",
        num_bytes=1,
        taken_at=NOW - age,
    )


def numbers(plan) -> list[int]:
    return [s.number for s in plan.drop]


SNAPSHOTS = [taken(n, age) for n, age in ((50, 1), (40, 20), (30, 40), (20, 120), (10, 300))]


def test_the_newest_old_and_the_newest_young_snapshots_are_kept():
    plan = plan_sweep(POLICY, SNAPSHOTS, None, set(), NOW)
    assert numbers(plan) == [30, 10] and plan.forget_upto == 20


def test_the_snapshot_for_an_open_sampler_is_kept():
    plan = plan_sweep(POLICY, SNAPSHOTS, 15, set(), NOW)
    assert numbers(plan) == [30, 20] and plan.forget_upto == 10
    plan = plan_sweep(POLICY, SNAPSHOTS, 35, set(), NOW)
    assert numbers(plan) == [10] and plan.forget_upto == 20


def test_snapshots_after_loads_are_kept():
    assert numbers(plan_sweep(POLICY, SNAPSHOTS, None, {30}, NOW)) == [10]


AGES = st.lists(st.floats(0, 400), max_size=12).map(sorted)


@given(AGES, st.none() | st.integers(0, 130), st.sets(st.integers(0, 12).map(lambda i: 10 * i)))
def test_needed_snapshots_are_kept_for_any_history(
    ages: list[float], sampler: int | None, pinned: set[int]
):
    snapshots = [taken(10 * (len(ages) - i), age) for i, age in enumerate(ages)]
    plan = plan_sweep(POLICY, snapshots, sampler, pinned, NOW)
    kept = [s.number for s in snapshots if s not in plan.drop]
    # The newest two are kept, in case one is damaged.
    assert kept[:2] == [s.number for s in snapshots[:2]][: len(kept)]
    if plan.forget_upto is not None:
        assert plan.forget_upto in kept  # operations are forgotten only before a snapshot
        assert sampler is None or plan.forget_upto <= sampler
        assert all(
            NOW - s.taken_at > POLICY.retention_s for s in snapshots if s.number <= plan.forget_upto
        )
    if sampler is not None and any(s.number <= sampler for s in snapshots):
        assert max(s.number for s in snapshots if s.number <= sampler) in kept
