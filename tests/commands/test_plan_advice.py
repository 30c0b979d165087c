"""What `plan` advises can be typed as it is printed, and then the plan fits."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl_actors.__main__ import app
from skyrl_actors.commands.job_cluster import fitted
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load
from skyrl_actors.messages.errors import SkyrlActorsError
from tests.conftest import ROOT

SHAPES = "configs/shapes"
JOB = (
    "cluster.base_model.type=pretrained",
    "cluster.base_model.name=q",
    "cluster.placement.device=gpu",
)


def planned(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    failed = isinstance(done.exception, SkyrlActorsError)
    return (2 if failed else done.exit_code), f"{done.output}\n{done.exception or ''}"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "arguments",
    [
        ("configs/colocated_1x8.yaml", "--gpus", "8xRTX4090", "--model", f"{SHAPES}/qwen3-8b"),
        ("configs/colocated_1x8.yaml", "engine.kv_cache_bytes=72000000000", "--gpus", "8xH100"),
        ("configs/jobs/ppo_tiny.yaml", *JOB, "--gpus", "1xH100", "--model", f"{SHAPES}/qwen3-1.7b"),
        (  # a part of this cache would hold no sequence
            *("configs/one_gpu_80gb.yaml", "engine.max_model_len=8192", "policy.dtype=float32"),
            *("engine.kv_cache_bytes=2415919104", "critic.dtype=float32", "--gpus", "1xH100"),
            *("policy.activations=keep", "critic.activations=keep"),
            *("--model", f"{SHAPES}/qwen3-8b"),
        ),
        (
            *("configs/jobs/grpo_tiny.yaml", *JOB, "job.lora_rank=16", "--gpus", "1xL40S"),
            *("--model", f"{SHAPES}/qwen3-8b"),
        ),
    ],
)
def test_the_printed_command_fits(arguments: tuple[str, ...]):
    if "--model" not in arguments:
        arguments = (*arguments, "--model", f"{SHAPES}/qwen3-1.7b")
    code, text = planned(*arguments)
    if code == 0:
        pytest.fail(f"the case fits without advice:\n{text}")
    command = re.search(r"for example: skyrl-actors plan (.*)", text)
    assert command, text
    code, text = planned(*shlex.split(command[1]))
    assert code == 0, text


def test_a_job_with_adapters_reserves_no_full_fine_tune_and_its_own_rank():
    job = ("configs/jobs/grpo_tiny.yaml", *JOB, "--gpus", "1xRTX4090", "--model")
    code, text = planned(*job, f"{SHAPES}/qwen3-1.7b", "job.lora_rank=8")
    assert code == 0 and "full weights" not in text, text
    rows = dict(re.findall(r"^(policy adapters)\s+(\d\.\d+)", text, re.M))
    code, wider = planned(*job, f"{SHAPES}/qwen3-1.7b", "job.lora_rank=32")
    assert rows != dict(re.findall(r"^(policy adapters)\s+(\d\.\d+)", wider, re.M))


def test_a_cache_that_does_not_hold_one_sequence_is_refused_as_serve_does():
    shape = ("--gpus", "1xRTX4090", "--model", f"{SHAPES}/qwen3-1.7b")
    code, text = planned("configs/one_gpu_24gb.yaml", *shape, "engine.kv_cache_bytes=536870912")
    assert code == 2 and "holds 4681 tokens" in text and "max_model_len=4096" in text, text


def test_a_reference_of_another_kind_keeps_its_room():
    reference = "job.reference={type: checkpoint, path: /somewhere}"
    keys = ("job.lora_rank=8", "job.kl={place: loss, coef: 0.1}", reference)
    config, _ = fitted(load("configs/jobs/grpo_tiny.yaml", keys, JobConfig))
    assert (config.cluster.lora.max_rank, config.cluster.lora.max_full_models) == (32, 1)
    config, _ = fitted(load("configs/jobs/grpo_tiny.yaml", keys[:1], JobConfig))
    assert (config.cluster.lora.max_rank, config.cluster.lora.max_full_models) == (8, 0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("configs/cpu_tiny.yaml", "--gpus", "1xH100"), "has placement.device=cpu; add"),
        (("configs/jobs/grpo_tiny.yaml", "--gpus", "1xH100"), "cluster.placement.device=gpu"),
        (
            ("configs/one_gpu_24gb.yaml", "--gpus", "1xL4", "--model", "n/config.json"),
            "no such file or folder",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], why: str):
    code, text = planned(*arguments)
    assert code == 2 and why in text, text


def test_unknown_memory_is_refused(tmp_path: Path):
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(
        "available_node_types:\n"
        "  w: {min_workers: 1, max_workers: 1, resources: {CPU: 8, GPU: 1}}\n"
        "head_node_type: w\n"
    )
    shape: Any = ("--model", f"{SHAPES}/qwen3-1.7b", "--nodes", str(nodes))
    code, text = planned("configs/one_gpu_24gb.yaml", *shape)
    assert code == 2 and "placement.device_memory_gib=" in text, text
    code, text = planned("configs/one_gpu_24gb.yaml", *shape, "placement.device_memory_gib=24")
    assert code == 0 or "does not fit" in text, text


def test_the_model_of_sizes_can_be_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def fetched(name: str) -> Path:
        asked.append(name)
        return ROOT / SHAPES / "qwen3-1.7b"

    monkeypatch.setattr("skyrl_actors.commands.sized._sizes_of", fetched)
    model = ("--gpus", "1xL4", "--model", "Qwen/Qwen3-1.7B")
    code, text = planned("configs/one_gpu_24gb.yaml", *model)
    assert asked == ["Qwen/Qwen3-1.7B"] and (code == 0 or "does not fit" in text), text


def test_no_advice_is_given_where_nothing_helps():
    job = ("configs/jobs/grpo_tiny.yaml", *JOB, "--gpus", "1xL4", "--model", f"{SHAPES}/qwen3-8b")
    code, text = planned(*job)
    assert code == 2 and "it fits with" not in text and "use larger devices" in text, text
