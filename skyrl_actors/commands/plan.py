"""`plan`: the placement of a config on given machines, without starting anything."""

import os
from collections.abc import Sequence
from pathlib import Path

from placement.nodes import nodes_from_cluster_file
from placement.render import render
from placement.types import DoesNotFit, Node
from skyrl_actors.backends.demands import plan_for
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.job import JobConfig
from skyrl_actors.config.load import load, top_level_keys
from skyrl_actors.messages.errors import ConfigError


def run(config_path: Path, overrides: Sequence[str], nodes_file: Path | None) -> None:
    config = _cluster_of(config_path, overrides)
    try:
        nodes = nodes_from_cluster_file(nodes_file) if nodes_file else [Node("this machine", float(os.cpu_count() or 1), 0.0)]
    except DoesNotFit as error:
        raise ConfigError(str(error)) from error
    print(render(plan_for(config, nodes)))


def _cluster_of(path: Path, overrides: Sequence[str]) -> ClusterConfig:
    if "cluster" in top_level_keys(path):
        return load(path, overrides, JobConfig).cluster
    return load(path, overrides)
