"""A service with two controllers: one is stopped and killed while SDK clients train on both."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from skyrl_actors.messages.paths import shard_of
from tests.conftest import run_cli
from tests.service.own_service import DATUM, own_service, process_in, status, steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, str]]:
    options = ("critic=null", "shards.count=2")
    with own_service("configs/cpu_tiny.yaml", folder, "shards", *options) as served:
        yield served


def model_on(url: str, number: int) -> Any:
    """Return a new model on this shard. Sessions go to the shards in turn."""
    for _ in range(4):
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        model = client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
        if shard_of(model.model_id) == number:
            return model
    raise AssertionError(f"no model on shard {number}")


def shard_rows(name: str) -> list[dict[str, Any]]:
    return status(name)["shards"]


def test_a_shard_that_dies_or_stands_still_does_not_touch_the_other(served: tuple[str, str]):
    name, url = served
    undisturbed, first, second = model_on(url, 2), model_on(url, 1), model_on(url, 2)
    wanted = steps(undisturbed, 6)
    found = {1: steps(first, 2), 2: steps(second, 2)}
    process = process_in(shard_rows(name)[0]["process"])

    os.kill(process, signal.SIGSTOP)
    found[2] += steps(second, 2)
    assert shard_of(model_on(url, 2).model_id) == 2
    assert httpx.get(f"{url}/healthz", timeout=30).status_code == 200
    rows = shard_rows(name)
    assert rows[0]["fault"] == "it does not answer" and rows[1]["fault"] is None

    passing = first.forward_backward([DATUM], "cross_entropy")
    os.kill(process, signal.SIGKILL)
    found[1].append(passing.result().metrics["loss:sum"])
    first.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    found[1] += steps(first, 3)
    found[2] += steps(second, 2)
    assert found == {1: wanted, 2: wanted}
    assert [row["epoch"] for row in shard_rows(name)] == [2, 1]


def test_a_sampler_on_one_shard_has_the_weights_of_a_model_on_the_other(served: tuple[str, str]):
    _, url = served
    model = model_on(url, 1)
    steps(model, 2)
    path = model.save_weights_for_sampler("shared").result().path
    prompt, one = (
        types.ModelInput.from_ints([5, 6, 7]),
        types.SamplingParams(max_tokens=8, temperature=0.0),
    )
    answers: dict[int, list[int]] = {}
    for _ in range(2):
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        sampler = client.create_sampling_client(model_path=path)
        answer = sampler.sample(prompt, num_samples=1, sampling_params=one).result()
        answers[len(answers)] = answer.sequences[0].tokens
    assert answers[0] == answers[1]


def test_commands_act_on_all_shards(served: tuple[str, str], folder: Path):
    name, url = served
    models = {model_on(url, number).model_id for number in (1, 2)}
    assert models <= {one["model_id"] for one in status(name)["models"]}
    refused = run_cli("status", "--name", f"{name}.2")
    assert refused.returncode == 2 and f"--name {name}" in refused.stderr
    log = run_cli("logs", "2.controller", "--name", name)
    assert log.returncode == 0, log.stderr
    drained = run_cli("drain", "--name", name, "--timeout", "60s")
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert {row["mode"] for row in shard_rows(name)} == {"draining"}
    assert run_cli("resume", "--name", name).returncode == 0
    config = ["configs/cpu_tiny.yaml", f"name={name}", "shards.count=2", "critic=null"]
    config += [f"journal.folder={folder / 'journal'}", f"checkpoint_dir={folder / 'checkpoints'}"]
    backup = folder / "backup"
    made = run_cli("backup", config[0], str(backup), *config[1:])
    assert made.returncode == 0, made.stdout + made.stderr
    assert (backup / "journal").is_dir() and (backup / "journal_2").is_dir()
    checked = run_cli("check", str(backup))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listed = run_cli("journal", *config, "--json")
    assert all(model in listed.stdout for model in models), listed.stdout + listed.stderr
