"""W&B and MLflow follow a run from a thread of their own: one that can not be reached costs a warning, never the run.

Rows wait, so many as ROWS, until the tracker answers again; metrics.jsonl has all of them in any case.
"""

import importlib.util
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tenacity import RetryError, Retrying, sleep_using_event, stop_when_event_set, wait_fixed

from skyrl_actors.config.trackers import MlflowTracker, Tracker, WandbTracker
from skyrl_actors.messages.errors import ConfigError

log = logging.getLogger(__name__)
ROWS = 10_000
RETRY_S, CLOSE_S = 30.0, 20.0
PARAMS_AT_ONCE, PARAM_CHARACTERS = 100, 500  # what MLflow takes
IDS = "trackers.json"  # in the run's folder: under which ids trackers know it
_IDS_LOCK = threading.Lock()
MODULES = {"wandb": "wandb", "mlflow": "mlflow"}
for _loud in ("wandb", "mlflow"):
    logging.getLogger(_loud).setLevel(logging.ERROR)


class Sink(Protocol):
    """One tracker. Whatever these raise is tried again."""

    def open(self, run_id: str | None) -> str:
        """Begin, or go on with, a run; its id."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    def __init__(self, config: WandbTracker, name: str, folder: Path, settings: Mapping[str, Any]):
        self._config, self._name, self._folder, self._settings = config, name, folder, settings
        self._run: Any = None

    def open(self, run_id: str | None) -> str:
        import wandb

        self._run = wandb.init(
            project=self._config.project, entity=self._config.entity, mode=self._config.mode, name=self._name, id=run_id, resume="allow",
            dir=str(self._folder), config=dict(self._settings), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # W&B's own counter takes no row again; a resumed run makes some again
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, config: MlflowTracker, name: str, settings: Mapping[str, Any]):
        self._config, self._name, self._settings = config, name, settings
        self._client: Any = None
        self._run_id = ""

    def open(self, run_id: str | None) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._config.uri)
        run_id = run_id or self._run_id or None  # a try that failed half-way made one
        if run_id is None:
            found = self._client.get_experiment_by_name(self._config.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._config.experiment)
            run_id = str(self._client.create_run(experiment, run_name=self._name).info.run_id)
        self._run_id = run_id
        if not self._client.get_run(run_id).data.params:
            params = [Param(key, value) for key, value in _flat(self._settings).items()]
            for start in range(0, len(params), PARAMS_AT_ONCE):
                self._client.log_batch(run_id, params=params[start : start + PARAMS_AT_ONCE])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Follower:
    def __init__(self, kind: str, sink: Sink, folder: Path, warn: Callable[[str], None]):
        self._kind = kind
        self._sink = sink
        self._ids = folder / IDS
        self._warn = warn
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(ROWS)
        self._leaving = threading.Event()
        self._given = self._told = 0  # rows
        self._ended = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker-{kind}")
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._given += 1
        with suppress(queue.Full):
            self._rows.put_nowait((step, dict(metrics)))

    def close(self) -> None:
        """Waits CLOSE_S at most."""
        until = time.monotonic() + CLOSE_S
        with suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_S)
        patience = threading.Timer(CLOSE_S / 2, self._leaving.set)
        patience.start()
        self._thread.join(max(0.0, until - time.monotonic()))
        patience.cancel()
        if not self._ended:
            self._warn(
                f"{self._kind} has not heard of the end of this run, and of {self._given - self._told} row(s); metrics.jsonl has all"
            )

    def _work(self) -> None:
        try:
            self._tried("begin", self._open)
            while (row := self._rows.get()) is not None:
                self._tried(f"step {row[0]}", lambda row=row: self._sink.log(*row))
                self._told += 1
            self._tried("end", self._sink.close)
            self._ended = self._told == self._given
        except RetryError as error:
            log.debug("given up: %s", error)

    def _open(self) -> None:
        run_id = self._sink.open(self._known().get(self._kind))
        with _IDS_LOCK:  # another tracker may have begun meanwhile
            staging = self._ids.with_name(f".{IDS}.partial")
            staging.write_text(json.dumps({**self._known(), self._kind: run_id}) + "\n")
            os.replace(staging, self._ids)

    def _known(self) -> dict[str, str]:
        return json.loads(self._ids.read_text()) if self._ids.exists() else {}

    def _tried(self, what: str, call: Callable[[], None]) -> None:
        """Until it works or the run is over; the first fault of each call is said."""

        def said(state: Any) -> None:
            if state.attempt_number == 1:
                error = state.outcome.exception()
                text = f"{type(error).__name__}: {str(error)[:200]}"
                self._warn(
                    f"tracker {self._kind} could not be told ({what}): {text}. The run goes on, and it is tried again each {RETRY_S:.0f} s"
                )

        Retrying(
            wait=wait_fixed(RETRY_S),
            stop=stop_when_event_set(self._leaving),
            sleep=sleep_using_event(self._leaving),
            before_sleep=said,
        )(call)


def check_installed(trackers: Sequence[Tracker]) -> None:
    """Raises ConfigError for a tracker whose library is not here, or that is named twice."""
    kinds = [tracker.type for tracker in trackers]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(f"run.trackers names {kind} twice")
        if importlib.util.find_spec(MODULES[kind]) is None:
            raise ConfigError(f"run.trackers names {kind}, which is not installed: pip install 'skyrl-actors[{kind}]'")


def followers_of(
    trackers: Sequence[Tracker], name: str, folder: Path, settings: Mapping[str, Any], warn: Callable[[str], None]
) -> list[Follower]:
    found: list[Follower] = []
    for tracker in trackers:
        if isinstance(tracker, WandbTracker):
            sink: Sink = Wandb(tracker, name, folder, settings)
        else:
            sink = Mlflow(tracker, name, settings)
        found.append(Follower(tracker.type, sink, folder, warn))
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)[:PARAM_CHARACTERS]}
    return found
