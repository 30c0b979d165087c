"""Compare a run that is killed with SIGKILL and resumed with the same run undisturbed.

    python -m bench.resume [--config configs/jobs/ppo_tiny.yaml]

It compares every metric of every step and writes docs/images/resumed.png. It takes about five
minutes on two cores.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import ROOT, emit

STEPS, EVERY, KILLED_AT = 12, 3, 8
COMPARED = ("reward", "kl", "policy_loss", "value_loss", "policy_grad_norm", "eval/accuracy")
PICTURE = ROOT / "docs" / "images" / "resumed.png"


def start(config: str, folder: Path) -> subprocess.Popen[bytes]:
    overrides = [
        f"job.iterations={STEPS}",
        "job.stop_at_accuracy=1.01",
        "job.eval_every=3",
        f"run.checkpoint_every={EVERY}",
    ]
    command = [
        sys.executable,
        "-m",
        "skyrl_actors",
        "train",
        config,
        *overrides,
        f"run.folder={folder}",
        "run.name=run",
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "metrics.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )


def whole(config: str, folder: Path) -> None:
    if start(config, folder).wait():
        raise SystemExit("the run failed")


def killed_at(config: str, folder: Path, step: int) -> None:
    process = start(config, folder)
    while not any(row["step"] >= step for row in rows(folder)):
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(5)  # time for Ray's processes to detect it


def draw(undisturbed: list[dict[str, Any]], resumed: list[dict[str, Any]], at: int) -> None:
    from matplotlib.figure import Figure

    present = [key for key in COMPARED if any(key in row for row in undisturbed)]
    figure = Figure(figsize=(13, 3.2 * -(-len(present) // 3)), layout="constrained")
    for axes, key in zip(
        figure.subplots(-(-len(present) // 3), 3, squeeze=False).flat, present, strict=False
    ):
        for name, history, style in (
            ("undisturbed", undisturbed, "o-"),
            ("killed and resumed", resumed, "x--"),
        ):
            points = [(row["step"], row[key]) for row in history if key in row]
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=5)
        axes.axvline(at, color="gray", linewidth=1, linestyle=":")
        axes.set_title(key, fontsize=9)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/jobs/ppo_tiny.yaml")
    config = parser.parse_args().config
    with tempfile.TemporaryDirectory(prefix="bench-resume-") as scratch:
        left, right = Path(scratch) / "undisturbed", Path(scratch) / "killed"
        whole(config, left)
        killed_at(config, right, KILLED_AT)
        whole(config, right)
        undisturbed, resumed = rows(left), rows(right)
        summary = json.loads((right / "run" / "summary.json").read_text())
        assert (
            [row["step"] for row in resumed]
            == [row["step"] for row in undisturbed]
            == list(range(STEPS + 1))
        )
        largest = {
            key: max(
                abs(a[key] - b[key]) for a, b in zip(undisturbed, resumed, strict=True) if key in a
            )
            for key in COMPARED
            if any(key in row for row in undisturbed)
        }
        draw(undisturbed, resumed, summary["resumed_at"])
        emit(
            "resume",
            {
                "config": config,
                "steps": STEPS,
                "killed_behind": KILLED_AT,
                "resumed_at": summary["resumed_at"],
                "largest_difference": largest,
            },
        )


if __name__ == "__main__":
    main()
