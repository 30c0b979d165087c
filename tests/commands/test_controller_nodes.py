"""Where both processes of a controller run, on two nodes of a real Ray."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from skyrl_actors.commands import cluster
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.journal import JournalConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.controller.standby import actor_names
from skyrl_actors.remote import NAMESPACE

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module", autouse=True)
def nodes():
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20}
    )
    made.add_node(num_cpus=1)
    ray.init(made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, *_: Any): ...

        async def where(self) -> tuple[str, int]:  # Ray would start a thread for each call
            return ray.get_runtime_context().get_node_id(), os.getpid()

    monkeypatch.setattr(cluster, "ControllerActor", Process)


def config_of(name: str, url: str | None) -> ClusterConfig:
    return ClusterConfig(
        name=name,
        journal=JournalConfig(url=url, folder=Path("/shared/journal")),
        restart=RestartConfig(standby_controller=True),
    )


def where(name: str) -> tuple[str, int]:
    node, process = ray.get(ray.get_actor(name, namespace=NAMESPACE).where.remote(), timeout=60)
    return node, process


def both(config: ClusterConfig) -> list[tuple[str, int]]:
    return [where(name) for name in actor_names(config.name)]


def restarted(name: str, before: int) -> tuple[str, int]:
    """Return where a process is that Ray started in place of this one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(ray.exceptions.RayActorError):
            if (found := where(name))[1] != before:
                return found
        time.sleep(0.1)
    raise TimeoutError(f"{name} was not restarted")


def end(config: ClusterConfig) -> None:
    for name in actor_names(config.name):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("number", range(3))
def test_two_processes_are_on_two_machines_also_after_restarts(number: int):
    config = config_of(f"places-{number}", "postgresql://db/journal")
    cluster.create_controller(config, {}, True)
    cluster.create_standby(config, {})
    placed = both(config)
    assert len({node for node, _ in placed}) == 2

    for name, (node, process) in zip(actor_names(config.name), placed, strict=True):
        os.kill(process, signal.SIGKILL)

        assert restarted(name, process)[0] == node
    end(config)


@pytest.mark.usefixtures("stub")
def test_a_process_whose_node_is_gone_starts_on_another(nodes: Cluster):
    config = config_of("places-lost", "postgresql://db/journal")
    third = nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    cluster.create_controller(config, {}, True)
    cluster.create_standby(config, {})
    (first, _), (second, process) = both(config)
    lost = {node.node_id: node for node in nodes.worker_nodes}[second]
    nodes.remove_node(lost)
    left = {node.node_id for node in nodes.list_all_nodes()} - {first}
    assert {restarted(actor_names(config.name)[1], process)[0]} == left, third
    end(config)


@pytest.mark.usefixtures("stub")
def test_with_sqlite_both_are_on_this_machine():
    config = config_of("places-sqlite", None)
    cluster.create_controller(config, {}, True)
    cluster.create_standby(config, {})
    assert {node for node, _ in both(config)} == {ray.get_runtime_context().get_node_id()}
    end(config)


def test_copies_of_weights_are_removed_on_other_nodes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def removed(folders: list[str]) -> None:
        (Path(folders[0]) / ray.get_runtime_context().get_node_id()).touch()

    monkeypatch.setattr(cluster, "_remove_all", removed)
    cluster.remove_on_other_nodes([str(tmp_path)])
    here = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {here}
    assert others and {file.name for file in tmp_path.iterdir()} == others
