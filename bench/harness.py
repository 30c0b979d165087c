"""What the benchmarks share: a service by the real command, the machine's name, one JSON line a result."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
NAME, PORT = "bench", 8123


def cli(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "skyrl_actors", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


@contextmanager
def service(*overrides: str, config: str = "configs/cpu_tiny.yaml") -> Iterator[Callable[[], None]]:
    """A fresh service for one benchmark; the SDK finds it through its environment variables. Yields what serves again, on
    the same journal, after everything was killed."""
    os.environ |= {
        "TINKER_BASE_URL": f"http://127.0.0.1:{PORT}",
        "TINKER_API_KEY": "tml-bench",
        "TINKER_TELEMETRY": "0",
    }
    with tempfile.TemporaryDirectory(prefix="bench-journal-") as scratch:
        options = (f"name={NAME}", f"http.port={PORT}", "http.haproxy=true", f"journal.folder={scratch}", *overrides)

        def serve() -> None:
            cli("serve", config, *options)

        serve()
        try:
            yield serve
        finally:
            cli("stop", "--name", NAME)


def base_folder(warmup_steps: int = 0) -> Path:
    from skyrl_actors.backends.base_models import base_model_folder
    from skyrl_actors.config.cluster import TinyBase

    return base_model_folder(TinyBase(warmup_steps=warmup_steps), lambda count: [])


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
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
    """Print one JSON line and keep it in bench/results/<name>.jsonl."""
    line = {"bench": name, **result, "machine": machine(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    text = json.dumps(line)
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(text + "\n")
