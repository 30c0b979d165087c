"""The machines, read from a Ray cluster-launcher file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from placement.types import DoesNotFit, Node

# What nvidia-smi reports as total, MiB, by Ray's accelerator types that leave no doubt.
GPU_MIB = {
    "B200": 183_359, "H200": 143_771, "H100": 81_559, "A100-80G": 81_920, "A100-40G": 40_960, "L40S": 46_068, "L4": 23_034,
    "A10G": 23_028, "T4": 15_360,
}  # fmt: skip


def device_bytes_of(resources: Iterable[str]) -> int | None:
    """From a node's resource names, of which one is accelerator_type:H100 or the like."""
    for name in resources:
        kind = name.removeprefix("accelerator_type:")
        if kind != name and kind in GPU_MIB:
            return GPU_MIB[kind] * 2**20
    return None


def nodes_from_cluster_file(path: Path) -> list[Node]:
    """One node for the head and `max_workers` for each worker type. Raises DoesNotFit when the file can not say."""
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise DoesNotFit(f"{path}: cannot be read: {error}") from error
    types: Any = content.get("available_node_types") if isinstance(content, dict) else None
    if not types:
        raise DoesNotFit(f"{path}: no available_node_types; it should be a Ray cluster-launcher file")
    head = content.get("head_node_type")
    nodes: list[Node] = []
    for name, entry in types.items():
        resources = entry.get("resources") or {}
        labels = {str(key): str(value) for key, value in (entry.get("labels") or {}).items()}
        memory = resources.get("memory")
        count = 1 if name == head else int(entry.get("max_workers", content.get("max_workers", 0)))
        for i in range(count):
            label = name if count == 1 else f"{name}-{i}"
            cpus, gpus = float(resources.get("CPU", 0)), float(resources.get("GPU", 0))
            nodes.append(Node(label, cpus, gpus, labels, device_bytes_of(resources), int(memory) if memory else None))
    return nodes
