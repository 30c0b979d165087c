"""W&B and MLflow: what they are told, that they are found again, and that one that can not be reached costs a warning."""

import json
import time
from pathlib import Path

import pytest

from skyrl_actors.config.job import RunConfig
from skyrl_actors.config.trackers import MlflowTracker, WandbTracker
from skyrl_actors.jobs import followers
from skyrl_actors.jobs.followers import IDS, Follower, check_installed, followers_of
from skyrl_actors.messages.errors import ConfigError
from tests.conftest import free_port


def test_mlflow_has_every_row_and_a_resumed_run_goes_on_under_its_id(tmp_path: Path):
    from mlflow.tracking import MlflowClient

    tracker, said = MlflowTracker(uri=f"sqlite:///{tmp_path}/store.db", experiment="words"), list[str]()
    for steps in ((0, 1), (2, 3)):
        (follower,) = followers_of([tracker], "a", tmp_path, {"job": {"type": "ppo"}, "run": {"trackers": []}}, said.append)
        for step in steps:
            follower.log(step, {"reward": step / 4, "eval/accuracy": 0.5})
        follower.close()
    assert not said
    client = MlflowClient(tracker.uri)
    experiment = client.get_experiment_by_name("words")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"job.type": "ppo", "run.trackers": "[]"}
    assert run.info.run_name == "a" and run.info.status == "FINISHED"
    assert run.info.run_id == json.loads((tmp_path / IDS).read_text())["mlflow"]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward")] == [
        (0, 0),
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]


def test_wandb_offline_leaves_its_files(tmp_path: Path):
    said: list[str] = []
    (follower,) = followers_of([WandbTracker(mode="offline")], "a", tmp_path, {"seed": 1}, said.append)
    follower.log(0, {"reward": 0.5})
    follower.close()
    assert not said and list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert json.loads((tmp_path / IDS).read_text())["wandb"]


def test_two_trackers_keep_both_their_ids(tmp_path: Path):
    class Slow:
        def __init__(self, seconds: float):
            self.seconds, self.given = seconds, list[str | None]()

        def open(self, run_id: str | None) -> str:
            self.given.append(run_id)
            time.sleep(self.seconds)
            return f"id{self.seconds}"

        def log(self, step: int, metrics: object) -> None: ...

        def close(self) -> None: ...

    one, other = Slow(0.05), Slow(0.15)
    for _ in range(2):
        both = [Follower("wandb", one, tmp_path, print), Follower("mlflow", other, tmp_path, print)]
        for follower in both:
            follower.close()
    assert json.loads((tmp_path / IDS).read_text()) == {"wandb": "id0.05", "mlflow": "id0.15"}
    assert one.given == [None, "id0.05"] and other.given == [None, "id0.15"]


def test_who_can_not_be_reached_is_said_and_waited_for_no_longer_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(followers, "CLOSE_S", 2.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    (follower,) = followers_of([MlflowTracker(uri=f"http://127.0.0.1:{free_port()}")], "a", tmp_path, {}, said.append)
    began = time.monotonic()
    for step in range(5):
        follower.log(step, {"reward": 0.0})
    assert time.monotonic() - began < 1
    follower.close()
    assert time.monotonic() - began < 8
    assert "tracker mlflow could not be told (begin)" in said[0] and "The run goes on" in said[0]
    assert "has not heard of the end of this run, and of 5 row(s);" in said[-1] and len(said) == 2


class Flaky:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.faults = 2

    def open(self, run_id: str | None) -> str:
        return "x"

    def log(self, step: int, metrics: object) -> None:
        if step == 1 and self.faults:
            self.faults -= 1
            raise OSError("gone")
        self.rows.append(step)

    def close(self) -> None:
        self.rows.append(-1)


def test_rows_wait_until_it_answers_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(followers, "RETRY_S", 0.05)
    said, sink = list[str](), Flaky()
    follower = Follower("flaky", sink, tmp_path, said.append)
    for step in range(3):
        follower.log(step, {})
    follower.close()
    assert sink.rows == [0, 1, 2, -1]
    assert len(said) == 1 and "(step 1): OSError: gone" in said[0]


def test_trackers_that_can_not_be_are_refused(monkeypatch: pytest.MonkeyPatch):
    config = RunConfig.model_validate({"trackers": [{"type": "wandb"}, {"type": "wandb"}]})
    with pytest.raises(ConfigError, match="names wandb twice"):
        check_installed(config.trackers)
    monkeypatch.setitem(followers.MODULES, "mlflow", "no_such_library")
    with pytest.raises(ConfigError, match=r"pip install 'skyrl-actors\[mlflow\]'"):
        check_installed([MlflowTracker(uri="x")])
