"""Folders of checkpoints and snapshots that a rank does not see, or that cannot be written."""

from pathlib import Path
from typing import Any

import pytest

from skyrl_actors.backends.shared_folders import prove_shared
from skyrl_actors.config.cluster import ClusterConfig, JournalConfig
from skyrl_actors.messages.errors import ConfigError


class Ranks:
    """Ranks that see files below one of these folders only."""

    def __init__(self, *seen: Path):
        self.seen = seen

    async def broadcast(self, method: Any, path: str) -> list[bool]:
        assert method.__name__ == "exists" and Path(path).exists()
        return [path.startswith(str(folder)) for folder in self.seen]


def config(folder: Path) -> ClusterConfig:
    return ClusterConfig(
        checkpoint_dir=folder / "checkpoints", journal=JournalConfig(folder=folder / "journal")
    )


async def test_folders_that_all_ranks_see_are_accepted_and_left_clean(tmp_path: Path):
    await prove_shared(config(tmp_path), {"policy": Ranks(tmp_path, tmp_path)})
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


async def test_a_rank_that_does_not_see_a_folder_is_named(tmp_path: Path):
    groups = {"policy": Ranks(tmp_path), "critic": Ranks(tmp_path, tmp_path / "checkpoints")}
    said = r"journal\.folder .* critic rank\(s\) 1 cannot see .* storage that all nodes share"
    with pytest.raises(ConfigError, match=said):
        await prove_shared(config(tmp_path), groups)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


async def test_a_folder_that_cannot_be_written_is_found_at_start(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"checkpoint_dir .* cannot be written: File exists"):
        await prove_shared(config(tmp_path), {"policy": Ranks(tmp_path)})
