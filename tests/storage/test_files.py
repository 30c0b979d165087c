"""Folders that cannot be written are named before any process starts."""

from pathlib import Path

import pytest

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.files import check_writable


def test_a_folder_that_can_be_written_is_created_and_left_empty(tmp_path: Path):
    check_writable(tmp_path / "a" / "b", "checkpoint_dir")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["/proc/checkpoints", "{tmp}/file/checkpoints"])
def test_a_folder_that_cannot_be_written_is_named_with_its_key(place: str, tmp_path: Path):
    (tmp_path / "file").touch()
    folder = Path(place.format(tmp=tmp_path))
    with pytest.raises(ConfigError, match=f"checkpoint_dir: {folder} cannot be written"):
        check_writable(folder, "checkpoint_dir")
