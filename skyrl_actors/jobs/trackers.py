"""Where a run leaves its numbers: config, metrics.jsonl, TensorBoard events, samples, curves, summary.

Files are written whole under another name and renamed; metrics.jsonl grows by whole lines.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from skyrl_actors.jobs.metrics import REGISTRY, checked

CURVES = (
    "eval/accuracy", "eval/nll", "eval/loss", "eval/pair_accuracy", "reward", "nll", "loss", "pair_accuracy", "margin", "kl", "value_loss",
    "clip_fraction", "explained_variance", "entropy", "logprob_mismatch", "policy_grad_norm", "critic_grad_norm", "answer_tokens",
    "sample_tokens_per_s", "seconds/iteration",
)  # fmt: skip
SHOWN = 9


class RunFolder:
    """`runs/<name>`, or `<name>-2` and so on where one exists: no run overwrites another."""

    def __init__(self, parent: Path, name: str):
        from torch.utils.tensorboard import SummaryWriter

        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            self.path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                self.path.mkdir()
                break
            except FileExistsError:
                number += 1
        self.history: list[dict[str, float]] = []
        self._events = SummaryWriter(str(self.path / "tensorboard"))

    def write(self, name: str, text: str) -> None:
        staging = self.path / f".{name}.partial"
        staging.write_text(text)
        os.replace(staging, self.path / name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        row = {"step": step, **checked(metrics)}
        self.history.append(row)
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        for key, value in metrics.items():
            self._events.add_scalar(key, value, step)

    def samples(self, name: str, rows: Sequence[tuple[str, str, str, float]]) -> None:
        """(question, expected, answer, reward) of each."""
        lines = [f"{q}\n  expected {e!r}\n  answered {a!r}  reward {r:g}" for q, e, a, r in rows]
        self.write(name, "\n".join(lines) + "\n")

    def report(self, title: str) -> None:
        """report.png: the curves of the run."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 9), layout="constrained")
        figure.suptitle(title)
        present = [key for key in CURVES if any(key in row for row in self.history)][:SHOWN]
        for axes, key in zip(figure.subplots(3, 3).flat, present, strict=False):
            points = [(row["step"], row[key]) for row in self.history if key in row]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
            axes.set_title(f"{key} ({REGISTRY[key].unit})", fontsize=9)
            axes.set_xlabel("step", fontsize=8)
            axes.grid(alpha=0.3)
        staging = self.path / ".report.partial.png"
        figure.savefig(staging, dpi=110)
        os.replace(staging, self.path / "report.png")

    def summary(self, content: dict[str, Any]) -> None:
        self.write("summary.json", json.dumps(content, indent=2) + "\n")

    def close(self) -> None:
        self._events.close()


class MemoryWatch:
    """The highest sum of resident memory of this process, its children and the Ray processes of this machine, in bytes.

    Pages that processes share count once for each of them, so the figure is an upper bound.
    """

    PERIOD_S = 1.0

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memory-watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            self.peak_bytes = max(self.peak_bytes, self._resident_bytes())

    @staticmethod
    def _resident_bytes() -> int:
        roots = [psutil.Process(), *(p for p in psutil.process_iter(["name"]) if p.info["name"] == "raylet")]
        processes = {p.pid: p for root in roots for p in (root, *_children(root))}
        return sum(_rss(p) for p in processes.values())


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
