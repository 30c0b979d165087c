"""Whole steps and all phase moves of a worker on a device that is not the CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.second_device.steps import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reports(random_base: Path) -> dict[str, dict[str, Any]]:
    """Run all cases in one process of its own, because torch keeps the device once it has it."""
    command = [sys.executable, "-m", "tests.second_device", str(random_base), *CASES]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {report["case"]: report for report in found}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_computes_on_the_device_what_it_computes_on_a_cpu(
    case: str, reports: dict[str, dict[str, Any]]
):
    """Verbs of two models alternate with phases; a tensor on the wrong device is an error."""
    report = reports[case]
    assert report["device"] == "mtia"
    # Kernels of the two devices round in other places, and Adam's first steps enlarge differences.
    first, later = (1e-2, 0.3) if "bfloat16" in case else (1e-6, 2e-2 if "muon" in case else 2e-3)
    assert report["first_outputs"] < first
    assert report["outputs"] < later and report["weights"] < later


@pytest.mark.parametrize("case", CASES)
def test_nothing_stays_on_the_device_in_the_phase_of_the_engines(
    case: str, reports: dict[str, dict[str, Any]]
):
    assert reports[case]["left_bytes"] < 4096  # tables of positions, and counters


@pytest.mark.parametrize("case", CASES)
def test_the_frozen_base_is_copied_to_pinned_memory_once(
    case: str, reports: dict[str, dict[str, Any]]
):
    assert reports[case]["host_copies"] == 1 and reports[case]["pinned"]
