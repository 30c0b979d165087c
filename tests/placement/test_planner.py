import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.nodes import nodes_from_cluster_file
from placement.planner import plan
from placement.types import Demand, DoesNotFit, Node

ROOT = Path(__file__).parent.parent.parent
NODES = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 8)), min_size=1, max_size=4)


@given(NODES, st.integers(1, 6), st.integers(0, 6), st.integers(1, 6), st.booleans(), st.sampled_from(["GPU", "CPU"]))
def test_a_plan_places_everybody_once_or_says_why_not(sizes, policy, critic, engine, colocated, device):
    nodes = [Node(f"n{i}", c, g) for i, (c, g) in enumerate(sizes)]
    counts = {"policy": policy, "critic": critic, "engine": engine}
    if colocated:
        counts = dict.fromkeys(counts, policy)
    share = 0.3 if colocated else 1.0
    demands = [Demand(kind, count, share) for kind, count in counts.items() if count]
    capacity = {n.name: int(min(n.cpus, n.gpus) if device == "GPU" else n.cpus) for n in nodes}
    wanted = policy if colocated else sum(counts.values())
    if wanted > sum(capacity.values()):
        with pytest.raises(DoesNotFit, match=f"{wanted - sum(capacity.values())} short"):
            plan(demands, nodes, device, colocated)
        return
    made = plan(demands, nodes, device, colocated)
    assert len(made.slots) == wanted
    used = Counter(slot.node for slot in made.slots)
    assert all(used[name] <= capacity[name] for name in used)
    for kind, count in counts.items():
        assert len(made.slots_of(kind)) == count
    for slot in made.slots:
        assert sum(share for _, _, share in slot.holds) <= 1 + 1e-9


def test_a_group_that_fits_one_node_stays_on_it():
    nodes = [Node("a", 96, 8), Node("b", 96, 8)]
    made = plan([Demand("policy", 4), Demand("critic", 4), Demand("engine", 8)], nodes, "GPU", colocated=False)
    assert {s.node for s in made.slots_of("policy") + made.slots_of("critic")} == {"a"}
    assert {s.node for s in made.slots_of("engine")} == {"b"}


def test_shares_above_a_slot_do_not_fit():
    with pytest.raises(DoesNotFit, match="a slot is 1"):
        plan([Demand("policy", 1, 0.6), Demand("engine", 1, 0.6)], [Node("a", 8, 8)], "GPU", colocated=True)


def test_cluster_file_is_valid_for_ray_and_read_by_us():
    import yaml
    from ray.autoscaler._private.util import fillout_defaults, validate_config

    validate_config(fillout_defaults(yaml.safe_load((ROOT / "cluster.yaml").read_text())))
    assert [(n.name, n.gpus) for n in nodes_from_cluster_file(ROOT / "cluster.yaml")] == [
        ("head", 8.0),
        ("worker", 8.0),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["configs/colocated_1x8.yaml", "--nodes", "cluster.yaml"], 0, "policy[7] 0.3, critic[7] 0.3, engine[7] 0.3"),
        (["configs/split_2x8.yaml", "--nodes", "cluster.yaml"], 0, "free GPU slots: head: 0, worker: 0"),
        (["configs/split_2x8.yaml", "engine.num_engines=9", "--nodes", "cluster.yaml"], 2, "1 short"),
        (
            ["configs/split_2x8.yaml", "transfer.type=shm", "--nodes", "cluster.yaml"],
            2,
            "set transfer.type=object_store",
        ),
        (["configs/colocated_1x8.yaml", "policy.num_ranks=4"], 2, "policy.num_ranks is 4 and engine.num_engines is 8"),
        (["configs/jobs/ppo_tiny.yaml"], 0, "policy[0] 0.3, critic[0] 0.3, engine[0] 0.3"),
    ],
)
def test_plan_command(arguments: list[str], code: int, said: str):
    done = subprocess.run([sys.executable, "-m", "skyrl_actors", "plan", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
