"""The GPU benchmarks on a machine without a GPU: parts, the whole script, and its table."""

import subprocess
from pathlib import Path

import pytest

from bench.gpu.engines import Bench
from bench.gpu.goals import GOALS, table

ROOT = Path(__file__).parents[2]
ENGINE = {
    "switch_s": 0.8,
    "ipc_s": 0.3,
    "lora_switch_s": 0.1,
    "lora_first_token_s": 0.1,
    "mean_logprob_difference": 0.001,
}
RESULTS = {
    "gpu_engines": {"4B": ENGINE | {"switch_s": 9.0}, "8B": ENGINE},
    "gpu_train": {"lora_tokens_per_s": 12_345, "tenants8_ratio": 3.0, "lora_mfu": None},
}


def row_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


def test_the_table_has_every_goal_and_says_what_was_met():
    text = table(RESULTS, {"gpu_service": "ended after 300 s"})
    assert row_of(text, "change of phase").split()[-3:] == ["0.8", "s", "yes"]
    assert row_of(text, "sync of 8B").endswith("NO")
    assert "1.234e+04 tokens/s" in row_of(text, "LoRA training, 4B")
    assert row_of(text, "LoRA training, share").endswith("not measured")
    assert row_of(text, "sampling through").endswith("not measured")
    assert text.endswith("gpu_service: ended after 300 s")
    assert len(text.splitlines()) == len(GOALS) + 2


def test_figures_of_small_shapes_are_not_judged():
    text = table(RESULTS, {}, means_nothing=True)
    assert not [line for line in text.splitlines() if line.endswith(("yes", "NO"))]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_whole_script_measures_all_its_parts_with_small_shapes():
    command = ["bash", str(ROOT / "bench" / "gpu" / "run.sh"), "--tiny"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = ran.stdout.splitlines()[-len(GOALS) :]
    absent = [row for row in rows if "not measured" in row]
    assert len(absent) == 1 and "share of the device's peak" in absent[0]  # no GPU has no peak
    assert rows[-1].split()[-2:] == ["0", "nats"]  # kills change no answer


def test_the_script_measures_a_transfer_between_two_processes_without_vllm():
    bench = Bench(tiny=True)
    found = bench.offload() | bench.packing() | bench.lending()
    assert {
        "offload_ratio",
        "link_down_gb_per_s",
        "packing_gb_per_s",
        "ipc_transfer_gb_per_s",
    } <= set(found)
    assert all(value > 0 for value in found.values())
