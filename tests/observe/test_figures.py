"""The numbers that several displays show."""

import os
import subprocess

import psutil
import pytest

from skyrl_actors.observe.figures import Ends, PhasePeriod, ends_of, phase_periods
from skyrl_actors.observe.process import resident_bytes

TIMELINE = [
    {"at": 10.0, "phase": "TRAIN", "seconds": 0.5, "moves": []},
    {"at": 14.0, "phase": "SAMPLE", "seconds": 2.0, "moves": []},
]


def test_a_phase_lasts_from_the_end_of_its_moves_to_the_start_of_the_next():
    assert phase_periods(TIMELINE, 20.0) == [
        PhasePeriod(phase="TRAIN", entered=10.0, begun=10.5, ended=14.0),
        PhasePeriod(phase="SAMPLE", entered=14.0, begun=16.0, ended=20.0),
    ]
    assert [period.seconds for period in phase_periods(TIMELINE, 20.0)] == [3.5, 4.0]
    assert phase_periods([], 20.0) == []


def test_a_phase_whose_moves_still_run_has_lasted_no_time():
    assert phase_periods(TIMELINE, 15.0)[-1].seconds == 0.0


def test_the_ends_of_a_metric_skip_rows_without_it():
    history = [{"step": 1}, {"step": 2, "reward": 0.1}, {"step": 3, "reward": 0.4}, {"step": 4}]
    assert ends_of("reward", history) == Ends(0.1, 0.4)
    assert ends_of("kl", history) is None


def test_the_memory_of_a_process_that_has_ended_or_is_protected_is_zero(
    monkeypatch: pytest.MonkeyPatch,
):
    assert resident_bytes(psutil.Process(os.getpid())) > 2**20
    child = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(child.pid)
    child.kill()
    child.wait()
    assert resident_bytes(process) == 0

    def refused() -> None:
        raise psutil.AccessDenied()

    own = psutil.Process()
    monkeypatch.setattr(own, "memory_info", refused)
    assert resident_bytes(own) == 0
