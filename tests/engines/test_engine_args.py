"""The share of a GPU that an engine asks vLLM for."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from placement.devices import nodes_of
from placement.memory import ALL
from placement.shape import shape_of
from placement.types import Node
from skyrl_actors.backends.demands import plan_for
from skyrl_actors.backends.memory_demands import engine_bytes, memory_plan
from skyrl_actors.config import vllm_arguments
from skyrl_actors.config.load import load
from skyrl_actors.engines import engine_args
from skyrl_actors.engines.build import build_pool
from skyrl_actors.engines.engine_args import share_of
from skyrl_actors.messages.errors import ConfigError

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


def test_known_arguments_are_those_of_vllm():
    """They are read from vLLM's source, without an import."""
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert vllm_arguments.known_arguments() == fields
    assert fields >= {*vllm_arguments.BY_KEY, *vllm_arguments.BY_SERVICE}


def test_what_the_engine_sets_itself_is_refused(tmp_path: Path):
    """A further argument never changes what the service relies on."""
    call = inspect.getsource(engine_args.engine_args)
    given = set(re.findall(r"^ {8}(\w+)=", call, re.M)) | set(re.findall(r'"(\w+)":', call))
    given |= set(re.findall(r'on_device\["(\w+)"\]', call))
    assert given - {"replace"} <= {*vllm_arguments.BY_KEY, *vllm_arguments.BY_SERVICE}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_model_len", "vllm.max_model_len is set by engine.max_model_len; use that key"),
        ("logprobs_mode", "vllm.logprobs_mode is set by the service; leave it out"),
        ("kv_cache_dtpe", "no such argument; did you mean kv_cache_dtype"),
    ],
)
def test_other_arguments_are_refused_by_name(name: str, said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(ROOT / "configs" / "cpu_tiny.yaml", [f"engine.vllm.{name}=1"])


def test_further_arguments_reach_the_engine(random_base: Path):
    config = load(ROOT / "configs" / "cpu_tiny.yaml", ["engine.vllm.enable_prefix_caching=false"])
    nodes = [Node(name="here", cpus=2, gpus=0)]
    reserved: Any = None
    nobody: Any = None
    pool = build_pool(
        config,
        random_base,
        plan_for(config, nodes),
        reserved,
        {},
        {},
        nobody,
        nobody,
        1,
        False,
        print,
    )
    engine: Any = pool.engines[0]
    made = engine_args.engine_args(engine.site.spec)
    assert made.enable_prefix_caching is False and made.max_model_len == 512


def test_without_a_plan_vllm_keeps_its_default():
    assert share_of(0, 2**30) == {}
    assert share_of(2**31, 2**30) == {"gpu_memory_utilization": 1.0}
