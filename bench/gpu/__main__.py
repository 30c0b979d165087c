"""Run all GPU benchmarks, each in a process of its own, and print one table with all goals.

    bench/gpu/run.sh [--tiny]

It ends within 15 minutes: a part that takes longer than its share is ended, and the table says so.
With --tiny, all shapes are small, it runs on any machine, and its figures mean nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import torch

from bench.gpu.goals import table
from bench.harness import RESULTS, ROOT, machine

PARTS = {  # seconds of each benchmark
    "gpu_engines": ("bench.gpu.engines", 400),
    "gpu_train": ("bench.gpu.train", 180),
    "gpu_service": ("bench.gpu.service", 300),
}


def run(module: str, limit_s: float, tiny: bool) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON object that a benchmark printed, or None with the reason."""
    command = [sys.executable, "-m", module, *(["--tiny"] if tiny else [])]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # First the benchmark, which stops its service; then what is left of its session.
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return None, f"ended after {limit_s:.0f} s"
    found = [line for line in output.splitlines() if line.startswith('{"bench"')]
    if process.returncode or not found:
        return None, f"failed ({process.returncode}): {(errors or output)[-1500:]}"
    return json.loads(found[-1]), ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any machine")
    tiny = parser.parse_args().tiny
    on_gpu = torch.cuda.is_available()
    if not tiny and not on_gpu:
        raise SystemExit(
            "this machine has no CUDA device; --tiny runs the script with small shapes"
        )
    device = torch.cuda.get_device_name() if on_gpu else "no GPU"
    results: dict[str, dict[str, Any]] = {}
    troubles: dict[str, str] = {}
    began = time.monotonic()
    for name, (module, limit_s) in PARTS.items():
        print(f"{name} (at most {limit_s} s) ...", flush=True)
        found, why = run(module, limit_s, tiny)
        if found is None:
            troubles[name] = why
        else:
            results[name] = found
    now = datetime.now(UTC).isoformat(timespec="seconds")
    whole = {"bench": "gpu", "device": device, **results, "machine": machine(), "time": now}
    if not tiny:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "gpu.jsonl").open("a") as file:
            file.write(json.dumps(whole) + "\n")
        print(json.dumps(whole))
    print(f"\n{device}, {time.monotonic() - began:.0f} s in all")
    if tiny:
        print("small shapes: the figures mean nothing")
    print(table(results, troubles, means_nothing=tiny))
    sys.exit(1 if troubles else 0)


if __name__ == "__main__":
    main()
