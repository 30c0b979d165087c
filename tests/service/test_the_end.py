"""What the service says when a part of it dies. The last test that uses the service: it does not come back."""

import time

import httpx
import psutil

from tests.conftest import Service


def test_health_is_withdrawn_when_an_engine_dies(service: Service):
    assert httpx.get(f"{service.url}/healthz").status_code == 200
    for process in psutil.process_iter(["name"]):
        if (process.info["name"] or "").startswith("VLLM::"):
            process.kill()
    deadline = time.monotonic() + 10
    while (answer := httpx.get(f"{service.url}/healthz")).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert answer.status_code == 503 and "engine[0]" in answer.json()["reason"]
