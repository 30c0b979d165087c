"""More scripts than fit into the service, with the real SDK: they queue, and none fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, free_port

FITS, AT_ONCE = 2, 3
SILENT_S = 3.0


def started(module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-m", module, *arguments], {**os.environ, **variables}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_three_times_more_scripts_than_fit_end_without_an_error(tmp_path: Path):
    """No script closes its session. Sessions without heartbeats are removed for waiting scripts."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    folder, room = str(tmp_path), str(8 * FITS)
    service = started("tests.api.local", str(port), folder, folder, "{}", room, str(SILENT_S))
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/healthz")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        scripts = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0"}
        for first in range(0, 3 * FITS, AT_ONCE):
            several = [
                started("tests.api.quick_start", **scripts)
                for _ in range(first, min(first + AT_ONCE, 3 * FITS))
            ]
            for one in several:
                output, _ = one.communicate(timeout=90)
                assert one.returncode == 0 and output.splitlines()[-1] == "trained", output
    finally:
        service.terminate()
        service.communicate()
