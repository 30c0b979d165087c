"""The benchmarks of the controller run: they replace parts of it, which no type checker sees."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

RUN = """
import runpy, sys
from pathlib import Path
from bench import harness

harness.RESULTS = Path(sys.argv.pop(1))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def result_of(results: Path, *command: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(results), *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = results.iterdir()
    return json.loads(file.read_text())


@pytest.mark.slow
def test_the_simulated_cluster_runs(tmp_path: Path):
    sizes = ["--hours", "0.1", "--every-s", "120", "--tenants", "20", "--engines", "3"]
    found = result_of(tmp_path, "bench.scale_cluster", *sizes, "--snapshot-operations", "1")
    assert [one["hour"] for one in found["readings"]] == [0.03, 0.07, 0.1]
    assert found["steps"]["light"] > 0


@pytest.mark.slow
def test_the_cost_of_an_operation_is_measured(tmp_path: Path):
    found = result_of(tmp_path, "bench.scale", "--rounds", "1", "--engines", "2", "--only", "step")
    cost = found["2 engines"]["optim_step"]
    assert 0 < cost["loop_ms"] <= cost["cpu_ms"]


@pytest.mark.slow
def test_the_capacity_of_shards_is_measured(tmp_path: Path):
    found = result_of(tmp_path, "bench.scale_shards", "--rounds", "1", "--shards", "2")
    in_turn, at_once = found["2 shards"]["sample 256+256"].values()
    assert in_turn > 0 and at_once > 0
