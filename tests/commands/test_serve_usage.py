"""What `serve` prints when a service is ready."""

from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from skyrl_actors.commands import cluster
from skyrl_actors.commands.how_to_use import say_how_to_use, usage
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


def test_the_address_of_clients_is_shown_where_it_differs():
    http = {"host": "0.0.0.0", "open_to_network": True, "public_url": "https://rl.example.com/x/"}
    config = ClusterConfig.model_validate({"http": http})
    text = "\n".join(usage(config, "x"))
    assert "TINKER_BASE_URL=https://rl.example.com/x\n" in text and "0.0.0.0" not in text
    assert "load balancer" not in text
    config = ClusterConfig.model_validate({"http": {**http, "nodes": "all"}})
    assert "put a load balancer in front" in "\n".join(usage(config, "x"))


def test_without_one_it_is_the_address_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "dashboard_address", lambda: "x")
    http = {"host": "0.0.0.0", "open_to_network": True}
    say_how_to_use(ClusterConfig.model_validate({"http": http}))
    assert f"http://{get_node_ip_address()}:8000\n" in capsys.readouterr().out


def test_a_console_that_is_off_is_not_named():
    config = ClusterConfig.model_validate({"http": {"console": None}})
    assert "console" not in "\n".join(usage(config, "x"))
