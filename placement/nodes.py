"""The machines, read from a Ray cluster-launcher file."""

from pathlib import Path
from typing import Any

import yaml

from placement.types import DoesNotFit, Node


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
        count = 1 if name == head else int(entry.get("max_workers", content.get("max_workers", 0)))
        for i in range(count):
            label = name if count == 1 else f"{name}-{i}"
            nodes.append(Node(label, float(resources.get("CPU", 0)), float(resources.get("GPU", 0))))
    return nodes
