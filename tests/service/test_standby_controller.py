"""A second controller process takes over while an SDK's client trains."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import tinker
from tinker import types

from skyrl_actors.backends.lookout import LOOK_S
from tests.conftest import run_cli
from tests.service.own_service import DATUM, own_service, process_in, status, steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("standby")
    options = ("critic=null", "restart.standby_controller=true")
    with own_service("configs/cpu_tiny.yaml", folder, "standby", *options) as served:
        yield served
    assert not [p for p in psutil.process_iter(["cmdline"]) if is_controller(p)], (
        "a controller's process outlived its service"
    )


def is_controller(process: psutil.Process) -> bool:
    return (process.info["cmdline"] or [""])[0].startswith("ray::ControllerActor")


def with_standby(name: str) -> dict[str, Any]:
    """Return the status once a standby is ready."""
    for _ in range(60):
        if (found := status(name))["standby"] is not None:
            return found
        time.sleep(0.5)
    raise AssertionError("no standby controller was ready within 30 s")


def test_each_process_takes_over_in_turn_and_no_step_is_lost_or_done_twice(
    served: tuple[str, str],
):
    name, url = served
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    model, undisturbed = (
        client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=1).result()
        for _ in range(2)
    )

    wanted, found, processes = steps(undisturbed, 12), [], set()
    for epoch in range(1, 4):
        before = with_standby(name)
        assert before["epoch"] == epoch
        processes.add(process_in(before["process"]))
        passing = model.forward_backward([DATUM], "cross_entropy")
        os.kill(process_in(before["process"]), signal.SIGKILL)
        stepping = model.optim_step(types.AdamParams(learning_rate=1e-2))
        found.append(passing.result().metrics["loss:sum"])
        stepping.result()
        found += steps(model, 3)
        after = status(name)
        assert after["process"] == before["standby"], "the standby did not take over"
        assert after["groups"]["policy"]["pids"] == before["groups"]["policy"]["pids"]
    assert found == wanted
    assert len(processes) == 3


def test_a_takeover_does_not_wait_for_the_server_of_ray(served: tuple[str, str]):
    name, url = served
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    model, undisturbed = (
        client.create_lora_training_client("skyrl-actors/tiny", rank=4, seed=2).result()
        for _ in range(2)
    )
    wanted, found = steps(undisturbed, 3), steps(model, 1)
    before = with_standby(name)
    time.sleep(LOOK_S + 2)  # the standby has looked at what runs
    with stopped("gcs_server"):
        os.kill(process_in(before["process"]), signal.SIGKILL)
        found += steps(model, 2)
    assert found == wanted
    assert with_standby(name)["process"] == before["standby"]


@contextmanager
def stopped(program: str) -> Iterator[None]:
    """Let the one process of this program stand still."""
    (process,) = (p for p in psutil.process_iter(["name"]) if p.info["name"] == program)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_the_death_of_the_standby_disturbs_nobody_and_is_shown(served: tuple[str, str]):
    name, _ = served
    before = with_standby(name)
    assert f"standby {before['standby']}" in run_cli("status", "--name", name).stdout
    standby = process_in(before["standby"])
    os.kill(standby, signal.SIGSTOP)  # Ray would replace a killed one before it is seen
    time.sleep(13)
    missing = status(name)
    assert missing["standby"] is None and missing["warning"] == "no standby controller is ready"
    os.kill(standby, signal.SIGKILL)
    after = with_standby(name)
    assert process_in(after["standby"]) != standby
    assert (after["process"], after["epoch"]) == (before["process"], before["epoch"])
