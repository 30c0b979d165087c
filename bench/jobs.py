"""The metric of each tiny job before and after training, with `ray job submit` on this machine.

    python -m bench.jobs [--seeds 3] [--only grpo_tiny,sft_tiny]

Three seeds of every job take about 20 minutes on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import ROOT, emit
from examples.make_data import main as make_data

JOBS = ("ppo_tiny", "grpo_tiny", "grpo_tiny_moe", "sft_tiny", "dpo_tiny", "reward_model_tiny")
LONGEST_S = 600.0
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token"}


def ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONGEST_S + 60
    )


def submit(name: str, seed: int, folder: Path) -> dict[str, object]:
    run = f"{name}-{seed}"
    command = [
        "job",
        "submit",
        "--working-dir",
        ".",
        "--",
        "python",
        "-m",
        "skyrl_actors",
        "train",
        f"configs/jobs/{name}.yaml",
    ]
    command += [f"job.seed={seed}", f"run.folder={folder}", f"run.name={run}"]
    if not name.startswith(("ppo", "grpo")):
        data = "answers" if name == "sft_tiny" else "pairs"
        command.append(f"job.data.path={folder}/data/{data}.jsonl")
    for _ in range(20):  # Ray's job agent starts some time after Ray
        done = ray(*command)
        if "No available agent" not in done.stderr + done.stdout:
            break
        time.sleep(2)
    if done.returncode:
        raise SystemExit(f"{run} failed:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return json.loads((folder / run / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--only", default=",".join(JOBS), help="names of configs/jobs, comma-separated"
    )
    chosen = parser.parse_args()
    started = ray(
        "start",
        "--head",
        "--disable-usage-stats",
        "--dashboard-host=127.0.0.1",
        "--node-ip-address=127.0.0.1",
    )
    if started.returncode:
        raise SystemExit(f"ray start failed:\n{started.stdout}\n{started.stderr}")
    try:
        with tempfile.TemporaryDirectory(prefix="bench-jobs-") as scratch:
            folder = Path(scratch)
            make_data(folder / "data")
            for name in chosen.only.split(","):
                runs = [submit(name, seed, folder) for seed in range(chosen.seeds)]
                emit(
                    "jobs",
                    {
                        "job": name,
                        "metric": runs[0]["metric"],
                        **{
                            key: [run[key] for run in runs]
                            for key in (
                                "metric_before",
                                "metric_after",
                                "steps",
                                "seconds",
                                "peak_rss_gib",
                            )
                        },
                        "median_after": statistics.median(
                            float(str(run["metric_after"])) for run in runs
                        ),
                    },
                )
    finally:
        ray("stop", "--force")


if __name__ == "__main__":
    main()
