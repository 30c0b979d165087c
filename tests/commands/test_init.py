"""A project from `init`, and the configs that are shipped with the package."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from skyrl_actors.commands import init
from skyrl_actors.commands.job_defaults import for_real_model
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import found, load
from skyrl_actors.messages.errors import ConfigError
from tests.conftest import ROOT, run_cli


def test_a_project_has_a_job_that_loads_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    init.run(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    job = load(tmp_path / "mine" / "job.yaml", (), JobConfig)
    assert job.cluster.engine.max_model_len == 512 and job.cluster.critic is None
    assert load(tmp_path / "mine" / "service.yaml").base_model.name == "skyrl-actors/tiny"
    rows = (tmp_path / "mine" / "data" / "questions.jsonl").read_text().splitlines()
    assert len(rows) > 3000
    assert all(json.loads(row)["prompt"][9:] == json.loads(row)["completion"][::-1] for row in rows)


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "rewards.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"has rewards\.py already"):
        init.run(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rewards.py"]


def test_shipped_configs_are_found_where_no_file_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert load("configs/cpu_tiny.yaml").base_model.name == "skyrl-actors/tiny"
    assert load("configs/jobs/ppo_tiny.yaml", (), JobConfig).job.type == "ppo"
    own = tmp_path / "configs" / "cpu_tiny.yaml"
    own.parent.mkdir()
    own.write_text("name: mine\nextends: configs/base.yaml\n")
    assert load("configs/cpu_tiny.yaml").name == "mine"
    assert found(Path("configs/none.yaml")) == Path("configs/none.yaml")
    moved = tmp_path / "gone" / "configs" / "cpu_tiny.yaml"
    assert found(moved) == moved, "a file of one's own that is not there is missing"
    with pytest.raises(ConfigError, match="no such file"):
        load("configs/none.yaml")


BATCH = {"prompts": 128, "samples_per_prompt": 8, "epochs": 1}


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        ({"type": "sft"}, {"learning_rate": 1e-5}),
        ({"type": "dpo", "lora_rank": 32}, {"learning_rate": 5e-6}),
        ({"type": "grpo", "lora_rank": 32}, {"learning_rate": 1e-5, "max_tokens": 1024, **BATCH}),
        ({"type": "grpo", "max_tokens": 7}, {"learning_rate": 1e-6, "max_tokens": 7, **BATCH}),
        (
            {"type": "grpo", "samples_per_prompt": 16, "epochs": 3},
            {"learning_rate": 1e-6, "max_tokens": 1024, "prompts": 64},
        ),
    ],
)
def test_values_for_real_models_follow_the_kind_of_training(
    job: dict[str, object], wanted: dict[str, object]
):
    is_rl = job["type"] == "grpo"
    assert for_real_model(job, is_rl, False, served("gpu", 16384)) == wanted | job


def test_values_for_real_models_follow_critic_device_and_limits():
    with_critic = for_real_model({"type": "ppo"}, True, True, served("gpu", 1000))
    assert with_critic["max_tokens"] == 500 and with_critic["critic_lr"] == 5e-6
    assert (with_critic["prompts"], with_critic["samples_per_prompt"]) == (256, 4)
    on_cpu = for_real_model({"type": "grpo"}, True, False, served("cpu", 1000))
    assert (on_cpu["prompts"], on_cpu["samples_per_prompt"]) == (8, 8)
    few = served("gpu", 1000, limits={"samples_in_flight": 2})
    assert for_real_model({"type": "grpo"}, True, False, few)["samples_per_prompt"] == 2
    one = served("gpu", 1000, limits={"samples_in_flight": 1})
    assert for_real_model({"type": "grpo"}, True, False, one)["samples_per_prompt"] == 2
    refused = for_real_model({"type": "grpo", "samples_per_prompt": 0}, True, False, few)
    assert refused["samples_per_prompt"] == 0 and "prompts" not in refused


def served(device: str, context: int, **keys: object) -> ClusterConfig:
    """Return a cluster's config with this device and context length."""
    return ClusterConfig.model_validate(
        {
            "base_model": {"type": "tiny"},
            "policy": {},
            "engine": {"max_model_len": context},
            "placement": {"device": device},
            **keys,
        }
    )


@pytest.mark.slow
def test_the_project_trains(tmp_path: Path):
    init.run(tmp_path)
    options = ("job.iterations=1", "job.env.eval_prompts=8", "job.prompts=8")
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_actors", "train", "job.yaml", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "my_job" / "report.html").is_file()
    assert "my_job" in run_cli("runs", str(tmp_path / "runs")).stdout


@pytest.mark.slow
def test_the_wheel_has_the_configs(tmp_path: Path):
    build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT))
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for file in ("cpu_tiny.yaml", "jobs/ppo_tiny.yaml", "shapes/qwen3-8b/config.json"):
        assert f"skyrl_actors/shipped/{file}" in names
    assert "skyrl_actors/console/index.html" in names
