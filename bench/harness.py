"""Shared code of the benchmarks: a real service, the machine's properties, and JSON results."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.nodes import TwoNodes

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
NAME, PORT = "bench", 8123
ENDS_WITHIN_S = 60  # an interrupted command


def cli(*arguments: str) -> None:
    """Run a command. An interrupted one cleans up before this returns."""
    with subprocess.Popen(
        [sys.executable, "-m", "skyrl_actors", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output = process.communicate()[0]
        except BaseException:
            process.terminate()
            try:
                process.communicate(timeout=ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{output}")


@dataclass(frozen=True)
class Served:
    config: str
    options: tuple[str, ...]
    nodes: TwoNodes | None

    def serve(self) -> None:
        """Start the service. After a power cut, this restarts it on the same journal."""
        if self.nodes is not None:
            self.nodes.start()
        cli("serve", self.config, *self.options)


@contextmanager
def service(
    *overrides: str, config: str = "configs/cpu_tiny.yaml", nodes: type[TwoNodes] | None = None
) -> Iterator["Served"]:
    """Run a new service for one benchmark, on its own Ray cluster or on these nodes.

    The SDK finds it through environment variables. SIGTERM stops the service, as Ctrl-C does.
    """
    for sent in (signal.SIGINT, signal.SIGTERM):  # shells start background commands without SIGINT
        signal.signal(sent, signal.default_int_handler)
    os.environ |= {
        "TINKER_BASE_URL": f"http://127.0.0.1:{PORT}",
        "TINKER_API_KEY": "tml-bench",
        "TINKER_TELEMETRY": "0",
    }
    with tempfile.TemporaryDirectory(prefix="bench-journal-") as scratch:
        options = (
            f"name={NAME}",
            f"http.port={PORT}",
            f"journal.folder={scratch}/journal",
            f"checkpoint_dir={scratch}/checkpoints",
            *overrides,
        )
        served = Served(config, options, nodes(config, options) if nodes else None)
        try:
            served.serve()
            yield served
        finally:
            try:
                cli("stop", "--name", NAME)
            finally:
                if served.nodes is not None:
                    served.nodes.end()


def base_folder(warmup_steps: int = 0) -> Path:
    from skyrl_actors.backends.base_models import base_model_folder
    from skyrl_actors.config.base_models import TinyBase

    return base_model_folder(TinyBase(warmup_steps=warmup_steps), lambda count: [])


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def emit(name: str, result: dict[str, Any]) -> None:
    """Print one JSON line and append it to bench/results/<name>.jsonl."""
    line = {
        "bench": name,
        **result,
        "machine": machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = json.dumps(line)
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(text + "\n")
