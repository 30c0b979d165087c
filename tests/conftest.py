"""Shared fixtures: a tiny base model, and one real service for all tests that need one."""

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TINKER_TELEMETRY", "0")

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from fsspec.core import url_to_fs
from hypothesis import HealthCheck, settings

from skyrl_actors.__main__ import use_ray_token

use_ray_token()  # before anything imports ray

from skyrl_actors.backends.base_models import base_model_folder  # noqa: E402
from skyrl_actors.config.base_models import TinyBase  # noqa: E402
from tests.marks import arrange, mark, skip_after_deadline  # noqa: E402

ROOT = Path(__file__).parent.parent
collect_ignore = ["gpu_check"]  # needs the CUDA builds: make gpu-check
# A slow example is not a failure.
settings.register_profile(
    "shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-machine")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups after this
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items)
    arrange(items)


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_after_deadline(item)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services without places of their own keep nothing in the folder of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def random_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model with random weights, for tests of numbers only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("base")))
        return base_model_folder(TinyBase(name="tiny", warmup_steps=0), lambda count: [])


def run_cli(
    *arguments: str, timeout: float = 240, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skyrl_actors", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd)


def free_port() -> int:
    """Return a port that is free now and outside of the ranges that others take ports from.

    The system's range is excluded, because Ray's processes take many ports before the service binds
    this one. So are Ray's own range (10002 to 19999) and that of Serve's replicas (30000 and up).
    """
    while True:
        with socket.socket() as probe:
            port = random.randrange(21_000, 29_000)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Run moto's server, which serves S3 over HTTP, and yield a bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    before = dict(os.environ)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                urllib.request.urlopen(url, timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        os.environ.update(
            AWS_ENDPOINT_URL=url,
            AWS_ACCESS_KEY_ID="a",
            AWS_SECRET_ACCESS_KEY="b",
            AWS_DEFAULT_REGION="us-east-1",
        )
        url_to_fs("s3://bucket")[0].mkdir("bucket")
        yield "s3://bucket"
        process.terminate()
    os.environ.clear()
    os.environ.update(before)


@dataclass(frozen=True)
class Service:
    name: str
    url: str
    checkpoints: Path
    base: Path
    journal: Path


def start_service(service: Service, *more: str) -> None:
    started = run_cli(
        "serve",
        "configs/cpu_tiny.yaml",
        f"name={service.name}",
        f"http.port={service.url.rsplit(':', 1)[1]}",
        f"checkpoint_dir={service.checkpoints}",
        f"journal.folder={service.journal}",
        "journal.snapshot_operations=5",
        "base_model.type=pretrained",
        "base_model.name=tiny",
        f"base_model.path={service.base}",
        "environment.A_VARIABLE=of the config",
        *more,
        timeout=540,  # a busy machine imports vLLM in minutes
    )
    assert started.returncode == 0, started.stdout + started.stderr


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, random_base: Path) -> Iterator[Service]:
    """A real service with its own Ray, started and stopped by the real commands."""
    port, folder = free_port(), tmp_path_factory.mktemp("service")
    name = f"test-{port}"
    made = Service(
        name, f"http://127.0.0.1:{port}", folder / "checkpoints", random_base, folder / "journal"
    )
    start_service(made)
    os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"] = made.url, "tml-test"
    yield made
    stopped = run_cli("stop", "--name", name)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    daemons = [
        p
        for p in psutil.process_iter(["name"])
        if p.info["name"] in ("raylet", "gcs_server", "haproxy")
    ]
    _, alive = psutil.wait_procs(daemons, timeout=3)  # one may be ending just now
    assert not alive
