"""The machines on which both processes of a controller run."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_actors.commands import cluster
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig


def test_an_sqlite_journal_keeps_both_processes_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On another machine, the same folder could be an empty one, and a second journal."""
    node, other = "ab" * 28, "cd" * 28
    here = SimpleNamespace(get_node_id=lambda: node)
    nodes = [{"NodeID": one, "Alive": one != "gone"} for one in (node, other, "gone")]
    monkeypatch.setattr(cluster.typed_ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(cluster.typed_ray, "nodes", lambda: nodes)
    on_disk = ClusterConfig(journal=JournalConfig(folder=tmp_path))
    for place in cluster._places(on_disk):
        strategy = place["scheduling_strategy"]
        assert (strategy.node_id, strategy.soft) == (node, False)
    elsewhere = JournalConfig(folder=tmp_path, url="postgresql://database/journal")
    selected = [
        place["label_selector"][cluster.NODE_ID]
        for place in cluster._places(ClusterConfig(journal=elsewhere))
    ]
    assert selected == [node, other]
