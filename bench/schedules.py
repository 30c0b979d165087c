"""GRPO on the tiny model with each schedule: seconds per iteration, staleness and accuracy.

    python -m bench.schedules [--rounds 3] [--iterations 10]

Policy and engine have separate devices. A round takes about 4 minutes on two cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import ROOT, emit

SCHEDULES = {
    "on_policy": (),
    "one_step_off": ("job.schedule.type=one_step_off",),
    "asynchronous": ("job.schedule={type: asynchronous, max_staleness: 2, slice_tokens: 6}",),
}


def run(name: str, seed: int, iterations: int, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "skyrl_actors",
        "train",
        "configs/jobs/grpo_tiny.yaml",
        *SCHEDULES[name],
    ]
    command += ["cluster.placement.layout=split"]
    command += [
        f"run.folder={folder}",
        f"run.name={name}-{seed}",
        f"job.seed={seed}",
        f"job.iterations={iterations}",
    ]
    command += ["job.stop_at_accuracy=1.01", f"job.eval_every={iterations}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = [
        json.loads(line)
        for line in (folder / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()
    ]
    # the first two iterations fill caches and pipelines
    steps = [row for row in rows if "seconds/iteration" in row][2:]
    return {
        "iteration_s": statistics.median(row["seconds/iteration"] for row in steps),
        "waited_s": statistics.median(row["seconds/sample"] for row in steps),
        "staleness": statistics.mean(row["staleness"] for row in steps),
        "staleness_max": max(row["staleness_max"] for row in steps),
        "accuracy": rows[-1]["eval/accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="seeds; schedules alternate within each"
    )
    parser.add_argument("--iterations", type=int, default=10)
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEDULES}
    with tempfile.TemporaryDirectory(prefix="bench-schedules-") as scratch:
        for seed in range(chosen.rounds):
            for name in SCHEDULES:
                found[name].append(run(name, seed, chosen.iterations, Path(scratch)))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    figures: dict[str, Any] = {"rounds": chosen.rounds, "iterations": chosen.iterations}
    for name, runs in found.items():
        figures |= {
            f"{name}_{key}": round(statistics.median(r[key] for r in runs), 3)
            for key in ("iteration_s", "waited_s", "staleness")
        }
        figures[f"{name}_staleness_max"] = max(r["staleness_max"] for r in runs)
        figures[f"{name}_accuracy"] = [r["accuracy"] for r in runs]
    for name in ("one_step_off", "asynchronous"):
        figures[f"{name}_ratio"] = round(
            figures[f"{name}_iteration_s"] / figures["on_policy_iteration_s"], 3
        )
    emit("schedules", figures)


if __name__ == "__main__":
    main()
