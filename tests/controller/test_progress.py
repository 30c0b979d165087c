"""When a snapshot of a model is due."""

import pytest

from skyrl_actors.config.cluster import JournalConfig
from skyrl_actors.controller.progress import COPY_SHARE, SNAPSHOT_BYTES, Progress

CONFIG = JournalConfig(snapshot_operations=4, snapshot_s=100.0)


@pytest.mark.parametrize(
    ("operations", "num_bytes", "now", "due"),
    [
        (3, 1, 50.0, False),
        (4, 1, 50.0, True),
        (1, SNAPSHOT_BYTES, 50.0, True),
        (1, 1, 101.0, True),
    ],
)
def test_operations_payload_or_time_make_a_snapshot_due(
    operations: int, num_bytes: int, now: float, due: bool
):
    progress = Progress(position=0)
    for number in range(operations):
        progress.applied(number + 1, num_bytes, 1.0)
    assert progress.snapshot_due(CONFIG, now) == due


def test_a_model_without_new_work_needs_no_snapshot():
    assert not Progress(position=0).snapshot_due(CONFIG, 1e9)


@pytest.mark.parametrize("seconds", [0.0, 0.01, 3.0])
def test_copies_take_at_most_their_share_of_the_time(seconds: float):
    """A model trains one operation each 0.1 s; each copy stops it for `seconds`."""
    progress, now, copying, copies = Progress(position=0), 0.0, 0.0, 0
    for number in range(10_000):
        now += 0.1
        progress.applied(number, 1, now)
        if progress.snapshot_due(CONFIG, now):
            now, copying, copies = now + seconds, copying + seconds, copies + 1
            progress.copied(seconds, now)
    assert copies == (2500 if seconds < 1 else pytest.approx(now * COPY_SHARE / seconds, abs=1))
    assert copying <= COPY_SHARE * now + seconds
