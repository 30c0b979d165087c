import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from placement.nodes import device_bytes_of, nodes_from_cluster_file
from placement.planner import plan
from placement.types import Demand, DoesNotFit, Node, Plan
from skyrl_actors.__main__ import app
from skyrl_actors.messages.errors import SkyrlActorsError

ROOT = Path(__file__).parent.parent.parent
NODES = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 8)), min_size=1, max_size=4)


def check(made: Plan, groups: list[list[Demand]], nodes: list[Node], device: str) -> None:
    """Check that each actor is placed once, blocks are on one node, and nothing is overfull."""
    for demand in (demand for group in groups for demand in group):
        slots = made.slots_of(demand.kind)
        assert len(slots) == demand.count
        for i in range(0, demand.count, demand.block):
            assert len({slot.node for slot in slots[i : i + demand.block]}) == 1
    for node in nodes:
        here = [slot for slot in made.slots if slot.node == node.name]
        assert sum(slot.resources.get("GPU", 0) for slot in here) <= node.gpus
        assert sum(slot.resources["CPU"] for slot in here) <= node.cpus
    assert all(sum(share for _, _, share in slot.holds) <= 1 + 1e-9 for slot in made.slots)
    assert len({slot.index for slot in made.slots}) == len(made.slots)


@given(
    NODES,
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(["GPU", "CPU"]),
)
def test_a_plan_places_each_actor_once_or_explains_the_shortage(
    sizes, policy, critic, engine, colocated, device
):
    nodes = [Node(name=f"n{i}", cpus=c, gpus=g) for i, (c, g) in enumerate(sizes)]
    counts = {"policy": policy, "critic": critic, "engine": engine}
    if colocated:
        counts = dict.fromkeys(counts, policy)
    demands = [
        Demand(kind=kind, count=count, share=0.3 if colocated else 1.0)
        for kind, count in counts.items()
        if count
    ]
    groups = [demands] if colocated else [[demand] for demand in demands]
    capacity = {n.name: int(min(n.cpus, n.gpus) if device == "GPU" else n.cpus) for n in nodes}
    wanted = policy if colocated else sum(counts.values())
    if wanted > sum(capacity.values()):
        with pytest.raises(DoesNotFit, match=f"{wanted - sum(capacity.values())} short"):
            plan(groups, nodes, device)
        return
    made = plan(groups, nodes, device)
    assert len(made.slots) == wanted
    check(made, groups, nodes, device)
    used = Counter(slot.node for slot in made.slots)
    assert made.free == {name: capacity[name] - used[name] for name in capacity}


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 512),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_clusters_of_1_to_4096_gpus(
    num_nodes: int, gpus: int, tensor: int, pipeline: int, data: st.DataObject
):
    nodes = [
        Node(name=f"n{i}", cpus=2 * gpus, gpus=gpus, labels={"rack": f"r{i // 8}"})
        for i in range(num_nodes)
    ]
    width = tensor * pipeline
    engines = data.draw(st.integers(1, max(1, num_nodes * gpus // width)))
    trainers = data.draw(st.integers(1, num_nodes * gpus))
    groups = [
        [Demand(kind="policy", count=trainers)],
        [Demand(kind="engine", count=engines * width, share=1.0, width=width, block=tensor)],
        [Demand(kind="helper", count=num_nodes, device="CPU")],
    ]
    try:
        made = plan(groups, nodes, "GPU")
    except DoesNotFit as error:
        enough = trainers + engines * width <= num_nodes * gpus
        assert ("times" in str(error)) == enough or "short" in str(error), error
        # If the width of engines divides the node size, every demand within the total is placed.
        assert not (enough and gpus % tensor == 0), error
        return
    check(made, groups, nodes, "GPU")
    assert len(made.actors_of("engine")) == engines and all(
        len(slots) == width for slots in made.actors_of("engine")
    )


def test_a_group_that_fits_one_node_stays_on_it():
    nodes = [Node(name="a", cpus=96, gpus=8), Node(name="b", cpus=96, gpus=8)]
    made = plan(
        [
            [Demand(kind="policy", count=4)],
            [Demand(kind="critic", count=4)],
            [Demand(kind="engine", count=8)],
        ],
        nodes,
        "GPU",
    )
    assert {s.node for s in made.slots_of("policy") + made.slots_of("critic")} == {"a"}
    assert {s.node for s in made.slots_of("engine")} == {"b"}


def test_a_group_larger_than_a_node_stays_in_one_nvlink_domain_or_rack():
    racks = [
        Node(name="a", cpus=96, gpus=4, labels={"rack": "r0"}),
        Node(name="b", cpus=96, gpus=8, labels={"rack": "r1"}),
        Node(name="c", cpus=96, gpus=8, labels={"rack": "r0"}),
        Node(name="d", cpus=96, gpus=8, labels={"rack": "r1"}),
    ]
    twelve = [[Demand(kind="policy", count=12)]]
    # the rack that it fills
    assert {slot.node for slot in plan(twelve, racks, "GPU").slots} == {
        "a",
        "c",
    }
    domains = [
        Node(name="e", cpus=96, gpus=8, labels={"rack": "r2", "nvlink-domain": "x"}),
        Node(name="f", cpus=96, gpus=8, labels={"rack": "r3", "nvlink-domain": "x"}),
    ]
    # nearer than a rack
    assert {slot.node for slot in plan(twelve, [*racks, *domains], "GPU").slots} == {
        "e",
        "f",
    }


def test_tensor_parallel_devices_are_on_one_node():
    nodes = [Node(name="a", cpus=8, gpus=3), Node(name="b", cpus=8, gpus=3)]
    made = plan([[Demand(kind="engine", count=4, share=1.0, width=2, block=2)]], nodes, "GPU")
    assert [slot.node for slot in made.slots] == ["a", "a", "b", "b"]
    with pytest.raises(
        DoesNotFit,
        match=r"engine needs 3 times 2 on one node, .*"
        r"\(a: 3, b: 3\) holds 2; .*engine\.tensor_parallel",
    ):
        plan([[Demand(kind="engine", count=6, share=1.0, width=2, block=2)]], nodes, "GPU")


def test_an_engine_is_spread_only_when_it_must_be():
    nodes = [Node(name="a", cpus=8, gpus=5), Node(name="b", cpus=8, gpus=4)]
    whole = plan(
        [[Demand(kind="engine", count=8, share=1.0, width=2, block=1)]], nodes, "GPU"
    ).actors_of("engine")
    assert all(len({slot.node for slot in slots}) == 1 for slots in whole)
    spread = plan(
        [[Demand(kind="engine", count=8, share=1.0, width=4, block=2)]],
        [Node(name=name, cpus=8, gpus=3) for name in "abcd"],
        "GPU",
    ).actors_of("engine")
    assert [len({slot.node for slot in slots}) for slots in spread] == [2, 2]


def test_shares_above_a_slot_do_not_fit():
    with pytest.raises(DoesNotFit, match="a slot is 1"):
        plan(
            [
                [
                    Demand(kind="policy", count=1, share=0.6),
                    Demand(kind="engine", count=1, share=0.6),
                ]
            ],
            [Node(name="a", cpus=8, gpus=8)],
            "GPU",
        )


def test_the_cluster_file_is_valid_for_ray_and_for_the_plan():
    import yaml
    from ray.autoscaler._private.util import fillout_defaults, validate_config

    validate_config(fillout_defaults(yaml.safe_load((ROOT / "cluster.yaml").read_text())))
    nodes = nodes_from_cluster_file(ROOT / "cluster.yaml")
    assert [(n.name, n.gpus) for n in nodes[:2]] == [("head", 8.0), ("worker", 8.0)]
    assert all(
        n.device_bytes == device_bytes_of(["accelerator_type:H100"]) and n.host_bytes
        for n in nodes[:2]
    )
    assert [(n.gpus, n.cpus) for n in nodes[2:]] == [(0.0, 32.0)] * 4


SHAPE = ["--nodes", "cluster.yaml", "--model", "configs/shapes/qwen3-8b"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["configs/colocated_1x8.yaml", *SHAPE], 0, "policy[7] 0.3, critic[7] 0.3, engine[7] 0.3"),
        (["configs/split_2x8.yaml", *SHAPE], 0, "free GPU slots: head: 0, worker: 0"),
        (
            ["configs/split_2x8.yaml", "engine.num_engines=4", "engine.tensor_parallel=2", *SHAPE],
            0,
            "engine[3].1 1",
        ),
        (["configs/split_2x8.yaml", "engine.num_engines=9", *SHAPE], 2, "1 short"),
        (
            ["configs/split_2x8.yaml", "transfer.type=shm", *SHAPE],
            2,
            "set transfer.type=object_store",
        ),
        (
            ["configs/colocated_1x8.yaml", "policy.num_ranks=4"],
            2,
            "policy.num_ranks is 4 and engine.num_engines is 8",
        ),
        (
            [
                "configs/colocated_1x8.yaml",
                "policy.strategy.type=replica",
                "critic.strategy.type=replica",
                *SHAPE,
            ],
            2,
            "too much",
        ),
        (
            ["configs/colocated_1x8.yaml", "engine.kv_cache_bytes=64000000000", *SHAPE],
            2,
            "it fits with engine.kv_cache_bytes=",
        ),
        (["configs/colocated_1x8.yaml", *SHAPE[:2]], 0, "pass its config.json with --model"),
        (["configs/jobs/ppo_tiny.yaml"], 0, "policy[0] 0.3, critic[0] 0.3, engine[0] 0.3"),
    ],
)
def test_plan_command(arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["plan", *arguments])
    refused = isinstance(done.exception, SkyrlActorsError)  # `main` prints it and returns 2
    assert (2 if refused else done.exit_code) == code, done.output
    assert said in f"{done.output} {done.exception}"


def test_placement_works_without_the_rest_of_the_project(tmp_path: Path):
    asks = tmp_path / "asks.yaml"
    asks.write_text("groups: [[{kind: policy, count: 8}], [{kind: helper, count: 2, device: CPU}]]")
    command = [sys.executable, "-m", "placement", str(asks), "--nodes", "cluster.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "helper[1] 1" in done.stdout, done.stderr
    asks.write_text("groups: [[{kind: policy, size: 8}]]")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "see --help for its form" in done.stderr
