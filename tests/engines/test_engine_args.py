"""The share of a GPU that an engine asks vLLM for."""

import json
from pathlib import Path

import pytest

from placement.devices import nodes_of
from placement.memory import ALL
from placement.shape import shape_of
from skyrl_actors.backends.demands import plan_for
from skyrl_actors.backends.memory_demands import engine_bytes, memory_plan
from skyrl_actors.config.load import load
from skyrl_actors.engines.vllm_engine import share_of

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("config", "gpus"), [("one_gpu_80gb", "1xH100"), ("colocated_1x8", "8xH100")]
)
def test_vllm_is_told_what_the_plan_leaves_beside_trainers(config: str, gpus: str):
    """vLLM refuses to start if less is free than it is told; its default is 0.92."""
    made, nodes = load(ROOT / "configs" / f"{config}.yaml"), nodes_of(gpus)
    shape = shape_of(json.loads((ROOT / "configs/shapes/qwen3-8b/config.json").read_text()))
    memory = memory_plan(made, shape, plan_for(made, nodes), nodes)
    ((device, parts),) = memory.parts.items()
    asleep = sum(part.bytes for part in parts if part.who != "engine" and part.phases == ALL)
    planned, total = engine_bytes(made, shape), nodes[0].device_bytes or 0
    share = share_of(planned, total)["gpu_memory_utilization"]
    assert share < 0.92 and share * total + asleep <= memory.used(device, "SAMPLE")
    assert share * total > made.engine.kv_cache_bytes


def test_without_a_plan_vllm_keeps_its_default():
    assert share_of(0, 2**30) == {}
    assert share_of(2**31, 2**30) == {"gpu_memory_utilization": 1.0}
