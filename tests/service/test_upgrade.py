"""A new version takes over a running service, under a client that trains."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.conftest import ROOT, free_port

pytestmark = pytest.mark.slow
PACKAGE = "skyrl_actors"
STEPS = 120


def previous_package(target: Path) -> None:
    """Write the package of the previous commit, or this one where there is no such commit."""
    archive = ["git", "archive", os.environ.get("PREVIOUS", "HEAD~1"), PACKAGE]
    packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if packed.returncode == 0:
        subprocess.run(["tar", "-x", "-C", str(target)], input=packed.stdout, check=True)
    else:  # a checkout without history
        shutil.copytree(ROOT / PACKAGE, target / PACKAGE)


def install(target: Path) -> None:
    """Replace the package by this one, as `pip install` does."""
    shutil.rmtree(target / PACKAGE)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, target / PACKAGE, ignore=ignored)


@dataclass
class Installed:
    """A service of the package in `site`."""

    site: Path
    name: str
    port: int
    options: list[str]

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", PACKAGE, *arguments],
            cwd=self.site,
            env=os.environ | {"PYTHONPATH": str(self.site)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def status(self) -> dict[str, object]:
        return json.loads(self.cli("status", "--name", self.name, "--json").stdout)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    site, port = tmp_path / "site", free_port()
    site.mkdir()
    previous_package(site)
    name = f"upgraded-{port}"
    options = [
        str(ROOT / "configs" / "cpu_tiny.yaml"),
        f"name={name}",
        f"http.port={port}",
        f"checkpoint_dir={tmp_path / 'checkpoints'}",
        f"journal.folder={tmp_path / 'journal'}",
        "critic=null",
    ]
    made = Installed(site, name, port, options)
    started = made.cli("serve", *options)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield made
    finally:
        made.cli("stop", "--name", name)


def trained(port: int, begun: threading.Event) -> tuple[list[float], float]:
    """Train a model. Return its logprobs, and the longest time of a step in seconds."""
    client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-anyone-1")
    model = client.create_lora_training_client("skyrl-actors/tiny", rank=8, seed=1).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4]},
    )
    longest = 0.0
    for number in range(STEPS):
        at = time.monotonic()
        model.forward_backward([datum] * 4, "cross_entropy").result(timeout=120)
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result(timeout=120)
        longest = max(longest, time.monotonic() - at)
        time.sleep(0.05)
        if number == 20:
            begun.set()
    outputs = model.forward([datum], "cross_entropy").result().loss_fn_outputs
    return list(outputs[0]["logprobs"].data), longest


def test_a_service_is_upgraded_under_a_client_that_trains(installed: Installed):
    before = installed.status()
    begun, found = threading.Event(), list[tuple[list[float], float]]()
    client = threading.Thread(target=lambda: found.append(trained(installed.port, begun)))
    client.start()
    try:
        assert begun.wait(60)
        install(installed.site)
        moved = [*installed.options, f"checkpoint_dir={installed.site}"]
        refused = installed.cli("upgrade", *moved)
        assert refused.returncode == 2 and "an upgrade keeps name, address" in refused.stderr
        done = installed.cli("upgrade", *installed.options)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        client.join(timeout=180)
    assert found, "the client failed"
    undisturbed, _ = trained(installed.port, threading.Event())
    assert found[0][0] == undisturbed
    after = installed.status()
    assert after["epoch"] == int(str(before["epoch"])) + 1 and after["fault"] is None
    # The same version again: nothing but controller and endpoint is replaced.
    again = installed.cli("upgrade", *installed.options)
    assert "took over engine[0]" in again.stdout and "took over the policy group" in again.stdout
