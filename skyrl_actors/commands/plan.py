"""`plan`: print placement and memory of a config on given machines, and start nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from placement.memory import render as render_memory
from placement.nodes import nodes_from_cluster_file
from placement.render import render
from placement.shape import ModelShape
from placement.types import DoesNotFit, Node
from skyrl_actors.backends.demands import plan_for
from skyrl_actors.backends.memory_demands import checked, refuse, shape_in
from skyrl_actors.config.cluster import ClusterConfig, TinyBase
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load, top_level_keys
from skyrl_actors.messages.errors import ConfigError


def run(
    config_path: Path, overrides: Sequence[str], nodes_file: Path | None, model: Path | None
) -> None:
    """Print placement and memory. Raises ConfigError if a plan is refused.

    Without `nodes_file`, the plan is for this machine. `model` replaces the configured base model.
    """
    config = _cluster_of(config_path, overrides)
    try:
        nodes = nodes_from_cluster_file(nodes_file) if nodes_file else [_this_machine()]
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error
    made = plan_for(config, nodes)
    print(render(made))
    shape, reason = _shape(config, model)
    if shape is None:
        print(f"\nno memory plan: {reason}")
        return
    memory, complaints = checked(config, shape, made, nodes)
    print(render_memory(memory, complaints if config.placement.memory_check == "warn" else []))
    refuse(config, complaints)


def _this_machine() -> Node:
    return Node(
        name="this machine",
        cpus=float(os.cpu_count() or 1),
        gpus=0.0,
        host_bytes=psutil.virtual_memory().total,
    )


def _shape(config: ClusterConfig, model: Path | None) -> tuple[ModelShape | None, str]:
    """Return the base model's shape, or None and why its config.json cannot be read."""
    if model is not None:
        return shape_in(model if model.is_dir() else model.parent), ""
    base = config.base_model
    if isinstance(base, TinyBase):
        return None, "the tiny model needs a few MiB"
    if base.path is not None:
        return shape_in(base.path.expanduser()), ""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(base.name, "config.json", revision=base.revision)
    if isinstance(found, str):
        return shape_in(Path(found).parent), ""
    return None, f"{base.name} is not on this machine; pass its config.json with --model"


def _cluster_of(path: Path, overrides: Sequence[str]) -> ClusterConfig:
    if "cluster" in top_level_keys(path):
        return load(path, overrides, JobConfig).cluster
    return load(path, overrides)
