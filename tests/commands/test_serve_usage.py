"""What `serve` prints when a service is ready."""

from pathlib import Path

import pytest

from skyrl_actors.commands.serve import usage
from skyrl_actors.config.cluster import ClusterConfig


def test_addresses_folders_and_commands_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "pack").write_bytes(bytes(3 * 2**20))
    config = ClusterConfig.model_validate(
        {"name": "mine", "http": {"port": 9000}, "journal": {"folder": "journal"}}
    )
    text = "\n".join(usage(config, "127.0.0.1:8265"))
    assert "console    http://127.0.0.1:9000/\n" in text
    assert "OpenAI     http://127.0.0.1:9000/v1\n" in text
    assert f"journal    {tmp_path}/journal (3.0 MiB)\n" in text
    assert "weights    /" in text and "/skyrl-actors/mine/" in text
    assert "run.folder=$PWD/runs" in text  # without it, the run stays in Ray's copy of the folder
    assert "status --name mine" in text and "stop --name mine" in text


def test_a_console_that_is_off_is_not_named():
    config = ClusterConfig.model_validate({"http": {"console": None}})
    assert "console" not in "\n".join(usage(config, "x"))
