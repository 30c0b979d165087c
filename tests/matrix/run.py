"""Run every call of many tinker SDK versions against one service, and print a table.

    python -m tests.matrix.run [VERSION …]     # make sdk-matrix

Each version is installed without dependencies into a separate folder. The packages of this
environment satisfy the dependencies of all versions. The service is the HTTP application with the
real controller and journal and a backend in memory. With --url it is a running service, and --model
must name its base model.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from skyrl_actors.backends.base_models import base_model_folder
from skyrl_actors.config.base_models import TinyBase
from tests.api.local import MODEL

ROOT = Path(__file__).parent.parent.parent
CACHE = Path.home() / ".cache" / "skyrl-actors" / "sdk"
VERSIONS = (
    "0.3.0",
    "0.9.0",
    "0.16.1",
    "0.18.2",
    "0.22.7",
    "0.24.1",
    "0.25.0",
    "0.26.2",
    "0.30.0",
    "0.34.0",
    "0.36.0",
    "0.38.0",
)
Outcomes = dict[str, str]


def installed(version: str) -> Path:
    """Install this version without dependencies. Return its folder."""
    folder = CACHE / version
    if not (folder / "tinker").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
            f"tinker=={version}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"tinker {version} cannot be installed:\n{done.stderr}")
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def local_service(base_folder: Path, **http: Any) -> Iterator[str]:
    port = _free_port()
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "tests.api.local",
            str(port),
            scratch,
            str(base_folder),
            json.dumps(http),
        ]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(10)


def _wait_for(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/healthz", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise SystemExit(f"no service at {url} within {timeout_s:.0f} s")


def takes_images(url: str, key: str) -> bool:
    """Return whether the base model of the service takes images."""
    answer = httpx.get(f"{url}/api/v1/get_server_capabilities", headers={"X-API-Key": key})
    return any(model.get("takes_images") for model in answer.json()["supported_models"])


def outcomes(
    version: str, url: str, model: str = MODEL, timeout_s: float = 180.0, key: str = "tml-matrix"
) -> Outcomes:
    """Return the outcome of each call: "ok", "absent", or the error."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed(version)),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "TINKER_PROJECT_ID": "matrix",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("calls.py")), model]
    if takes_images(url, key):
        command.append("--images")
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout_s
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"import": f"it ended with {done.returncode}: {done.stderr[-300:]}"}
    assert found["version"] == version, found["version"]
    return found["calls"]


def show(found: dict[str, Outcomes]) -> None:
    console = Console(width=56 + 9 * len(found))
    table = Table(
        title="calls of the tinker SDK by its version: + works, · not in this version, - fails",
        title_justify="left",
    )
    table.add_column("call", no_wrap=True)
    for version in found:
        table.add_column(version)
    names = list(dict.fromkeys(name for calls in found.values() for name in calls))
    marks = {"ok": "+", "absent": "·", None: ""}
    for name in names:
        table.add_row(name, *(marks.get(calls.get(name), "-") for calls in found.values()))
    console.print(table)
    for version, calls in found.items():
        for name, outcome in calls.items():
            if outcome not in marks:
                console.print(f"{version}  {name}: {outcome}", soft_wrap=True)


def main(
    versions: list[str] = typer.Argument(list(VERSIONS), help="versions of the SDK"),
    url: str = typer.Option("", help="URL of a running service; default: start one"),
    model: str = typer.Option(MODEL, help="its base model"),
) -> None:
    found: dict[str, Outcomes] = {}
    with (
        nullcontext(url)
        if url
        else local_service(base_model_folder(TinyBase(warmup_steps=0), lambda count: [])) as where
    ):
        for version in versions:
            found[version] = outcomes(version, where, model)
    show(found)
    failed = sum(
        outcome not in ("ok", "absent") for calls in found.values() for outcome in calls.values()
    )
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
