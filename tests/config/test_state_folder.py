"""Services keep their state below one folder of the user, wherever a command is typed."""

from pathlib import Path

import pytest

from skyrl_actors.commands import serve
from skyrl_actors.commands.left_behind import refuse_left_behind
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load
from skyrl_actors.messages.errors import ConfigError

TINY = "configs/cpu_tiny.yaml"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def places(config: ClusterConfig, home: Path) -> tuple[str, str]:
    below = home / ".local/state/skyrl-actors"
    return (
        str(config.journal.folder.relative_to(below)),
        str(config.checkpoint_dir.relative_to(below)),
    )


def test_each_service_and_base_model_has_its_own_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    model = "skyrl-actors/skyrl-actors--tiny"
    assert places(load(TINY), home) == (f"{model}/journal", f"{model}/checkpoints")
    other = load(TINY, ["name=b", "base_model.name=Qwen/Qwen3-8B", "journal.snapshot_s=5"])
    assert places(other, home) == ("b/Qwen--Qwen3-8B/journal", "b/Qwen--Qwen3-8B/checkpoints")
    several = load("configs/cpu_catalogue.yaml")
    assert places(several, home)[0] == "skyrl-actors/several-base-models/journal"
    for own in several.served().values():
        assert places(own, home) == places(several, home)
    odd = load(TINY, ["base_model.name=../../x"])
    assert places(odd, home)[0] == "skyrl-actors/x/journal"
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "elsewhere"))
    assert load(TINY).journal.folder.is_relative_to(home / "elsewhere/skyrl-actors")


def test_two_folders_of_one_name_are_two_base_models(home: Path):
    def place(path: str) -> Path:
        keys = ["base_model.type=pretrained", "base_model.name=checkpoint"]
        return load(TINY, [*keys, f"base_model.path={path}"]).journal.folder

    assert place("runs/one/checkpoint") != place("runs/two/checkpoint")
    assert place("runs/one/checkpoint") == place(f"{home}/runs/one/checkpoint")


def test_without_a_home_folder_places_must_be_named(monkeypatch: pytest.MonkeyPatch, home: Path):
    def missing(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", missing)
    for given in ([], ["journal.folder=/j"]):
        with pytest.raises(ConfigError, match=r"no home folder .* XDG_STATE_HOME, or journal"):
            load(TINY, given)
    config = load(TINY, ["journal.folder=/j", "checkpoint_dir=/c"])
    refuse_left_behind(config, home)


def test_what_a_config_names_stays():
    config = load(TINY, ["journal.folder=a", "checkpoint_dir=b"])
    assert (config.journal.folder, config.checkpoint_dir) == (Path("a"), Path("b"))


def test_a_job_finds_the_checkpoints_of_the_service_of_its_base_model():
    job = load("configs/jobs/grpo_tiny.yaml", schema=JobConfig)
    assert job.cluster.checkpoint_dir == load(TINY).checkpoint_dir


def test_a_first_deploy_does_not_forget_it_either(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "is_running", lambda name: False)
    (home / "journal").mkdir()
    (home / "journal/journal.json").touch()
    with pytest.raises(ConfigError, match="journal has the journal of an earlier service"):
        serve.deployed_application({"config": TINY})


def test_a_journal_of_an_earlier_version_is_not_forgotten(home: Path):
    def begin(*overrides: str) -> None:
        refuse_left_behind(load(TINY, list(overrides)), home)

    begin()
    for old in ("journal", "journal/tiny"):
        (home / old).mkdir()
        (home / old / "journal.json").touch()
        with pytest.raises(ConfigError, match=rf"{old} has the journal .* journal\.folder={old} "):
            begin()
        begin("journal.folder=journal")
        (home / old / "journal.json").unlink()
    (home / "journal/journal.json").touch()
    (home / "checkpoints/.sessions").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"checkpoints has the checkpoints .*checkpoint_dir="):
        begin("journal.folder=journal")
    begin("journal.folder=journal", "checkpoint_dir=checkpoints")
    load(TINY).checkpoint_dir.mkdir(parents=True)
    new = load(TINY).journal.folder
    new.mkdir(parents=True)
    (new / "journal.json").touch()
    begin()
