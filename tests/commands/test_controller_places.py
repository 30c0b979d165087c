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
    node = "ab" * 28
    here = SimpleNamespace(get_node_id=lambda: node)
    monkeypatch.setattr(cluster.typed_ray, "get_runtime_context", lambda: here)
    on_disk = ClusterConfig(journal=JournalConfig(folder=tmp_path))
    place = cluster._places(on_disk)
    assert not isinstance(place, str) and (place.node_id, place.soft) == (node, False)
    elsewhere = JournalConfig(folder=tmp_path, url="postgresql://database/journal")
    assert cluster._places(ClusterConfig(journal=elsewhere)) == "SPREAD"
