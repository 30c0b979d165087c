"""The demands of configs: layouts, devices of engines, and transfers that cannot reach a host."""

import pytest
from pydantic import ValidationError

from placement.types import Node
from skyrl_actors.backends.demands import demands_of, plan_for
from skyrl_actors.config.cluster import (
    ClusterConfig,
    EngineConfig,
    GroupConfig,
    LoraConfig,
    PlacementConfig,
)
from skyrl_actors.config.transfers import FileTransferConfig, StreamTransferConfig
from skyrl_actors.messages.errors import ConfigError

TWO = GroupConfig(num_ranks=2)
WIDE = EngineConfig(num_engines=1, tensor_parallel=2)


@pytest.mark.parametrize(
    ("layout", "together"),
    [
        ("colocated", [["policy", "critic", "engine"]]),
        ("mixed", [["policy", "engine"], ["critic"]]),
        ("split", [["policy"], ["critic"], ["engine"]]),
    ],
)
def test_the_layout_determines_which_roles_share_slots(layout: str, together: list[list[str]]):
    config = ClusterConfig(
        placement=PlacementConfig(layout=layout), policy=TWO, critic=TWO, engine=WIDE
    )  # type: ignore[arg-type]
    groups = demands_of(config)
    assert [[demand.kind for demand in group] for group in groups] == together
    engine = next(demand for group in groups for demand in group if demand.kind == "engine")
    assert (engine.count, engine.width, engine.block) == (2, 2, 2)
    assert len(plan_for(config, [Node(name="n", cpus=8, gpus=0)]).slots) == 2 * len(together)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transfer": StreamTransferConfig(type="nccl")}, "nccl needs GPUs"),
        (
            {
                "transfer": StreamTransferConfig(type="nccl"),
                "placement": PlacementConfig(device="gpu"),
            },
            "cannot connect two processes on one GPU",
        ),
        ({"transfer": StreamTransferConfig(type="ipc")}, "on a CPU use shm"),
        (
            {
                "transfer": StreamTransferConfig(type="ipc"),
                "placement": PlacementConfig(device="gpu", layout="split"),
                "critic": None,
            },
            "layout split separates them; use nccl",
        ),
        (
            {
                "transfer": StreamTransferConfig(type="ipc"),
                "placement": PlacementConfig(device="gpu"),
                "critic": None,
                "policy": TWO,
                "engine": WIDE,
            },
            "ipc needs engines of one device",
        ),
        (
            {"transfer": FileTransferConfig(type="lora")},
            "transfers adapters only, and lora.max_full_models is 1",
        ),
        (
            {"placement": PlacementConfig(layout="mixed"), "engine": EngineConfig(num_engines=3)},
            "mixed layout: policy.num_ranks is 1",
        ),
    ],
)
def test_impossible_configs_are_refused(options: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        ClusterConfig.model_validate(options)
    ClusterConfig(transfer=FileTransferConfig(type="lora"), lora=LoraConfig(max_full_models=0))


def test_shared_memory_does_not_reach_another_host():
    config = ClusterConfig(placement=PlacementConfig(layout="split"), critic=None)
    with pytest.raises(
        ConfigError,
        match=r"shm works on one host, .* would be on a, b; set transfer\.type=object_store",
    ):
        plan_for(config, [Node(name="a", cpus=1, gpus=0), Node(name="b", cpus=1, gpus=0)])
