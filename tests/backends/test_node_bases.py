"""The base model comes to every node of a Ray cluster before processes start there."""

import shutil
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from placement.planner import plan
from placement.reserve import cluster_nodes, reserve
from placement.types import Demand
from skyrl_actors.backends import node_bases
from skyrl_actors.backends.node_bases import NodeBases
from skyrl_actors.config.base_models import PretrainedBase
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.remote import NAMESPACE

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20}
    )
    made.add_node(num_cpus=1)
    ray.init(made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


async def test_every_node_gets_the_model_or_is_named(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both nodes are on this machine, so the folder goes when its contents are known."""
    said: list[str] = []
    whole = plan([[Demand(kind="policy", count=2)]], cluster_nodes(), "CPU")
    reserved = await reserve(whole, "bases", 60, said.append, False, False)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    right = node_bases.described

    def then_lost(*given):
        copy = right(*given)
        shutil.rmtree(folder)
        return copy

    monkeypatch.setattr(node_bases, "described", then_lost)
    bases = NodeBases(ClusterConfig(name="bases"), folder, reserved, said.append)
    await bases.ensure()
    assert (folder / "config.json").read_text() == "{}"  # the other node wrote it
    monkeypatch.setattr(node_bases, "described", lambda *_: pytest.fail("all nodes have it"))
    await bases.ensure()

    monkeypatch.setattr(node_bases, "described", then_lost)
    config = ClusterConfig(name="bases", base_model=PretrainedBase(name="own", path=folder))
    with pytest.raises(ConfigError, match=r"config.json is not on node .*storage that all nodes"):
        await NodeBases(config, folder, reserved, said.append).ensure()
