"""Read the folders of training runs."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from skyrl_actors.observe.figures import ends_of

STATE, SUMMARY, CONFIG = "state.json", "summary.json", "config.yaml"
BLOCK = 2**20  # bytes that are read at a time from the end of a file
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # each row has its step


def rows_in(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines. Incomplete lines are left out."""
    rows: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def last_rows(file: Path, most: int) -> list[dict[str, Any]]:
    """Return the last rows of a file of JSON lines. Incomplete lines are left out."""
    rows: list[dict[str, Any]] = []
    for line in _lines_from_end(file):
        with suppress(ValueError):
            rows.append(json.loads(line))
        if len(rows) == most:
            break
    return rows[::-1]


def last_samples(file: Path) -> list[dict[str, Any]]:
    """Return the samples of the last evaluation of a run."""
    rows: list[dict[str, Any]] = []
    for line in _lines_from_end(file):  # rows have images, so only those that are needed are read
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if rows and row["step"] != rows[0]["step"]:
            break
        rows.append(row)
    return rows[::-1]


def _lines_from_end(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    if not file.exists():
        return
    with file.open("rb") as stream:
        left, rest = stream.seek(0, os.SEEK_END), b""
        while left:
            size = min(BLOCK, left)
            left = stream.seek(left - size)
            first, *lines = (stream.read(size) + rest).split(b"\n")
            yield from reversed(lines)
            rest = first
        yield rest


def listed(parent: Path) -> list[dict[str, Any]]:
    """Return a summary of each run, sorted by name."""
    found: list[dict[str, Any]] = []
    for run in (
        sorted(path for path in parent.iterdir() if (path / CONFIG).exists())
        if parent.is_dir()
        else []
    ):
        summary, history = content_of(run / SUMMARY), rows_in(run / METRICS)
        job = summary or _job_of(run)
        evaluated = [row for row in history if any(key.startswith("eval/") for key in row)]
        metric = summary.get("metric") or next(
            (key for key in (evaluated[0] if evaluated else ()) if key.startswith("eval/")), None
        )
        ends = ends_of(metric or "", history)
        found.append(
            {
                "run": run.name,
                "job": job.get("job", ""),
                "state": state_of(run, history),
                "metric": metric or "",
                "before": f"{ends.first:.4g}" if ends else "",
                "after": f"{ends.last:.4g}" if ends else "",
                "steps": history[-1]["step"] if history else 0,
                "seed": job.get("seed", ""),
                "seconds": summary.get("seconds", ""),
            }
        )
    return found


def state_of(run: Path, history: Sequence[Mapping[str, Any]]) -> str:
    """Return the state of a run as text: finished, or unfinished and where it resumes."""
    if (run / SUMMARY).exists():
        return "finished"
    state = content_of(run / STATE)
    return (
        f"unfinished, resumes after step {state['step']}"
        if state
        else f"unfinished, restarts from 0 (was at step {history[-1]['step']})"
        if history
        else "unfinished, ended before its first step"
    )


def _job_of(run: Path) -> dict[str, Any]:
    """Return type and seed of a run from its config."""
    try:
        config = OmegaConf.load(run / CONFIG)
    except (OSError, YAMLError):
        return {}
    select: Any = OmegaConf.select
    return {"job": select(config, "job.type") or "", "seed": select(config, "job.seed")}


def content_of(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or {} if it does not exist or is incomplete."""
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except ValueError:
        return {}
