"""The cost of the control plane, with a backend that answers at once.

It is measured as milliseconds of each verb with one client, operations per second with many
clients, and memory over many requests.

    python -m bench.latency [--requests 100000]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import aiohttp
import psutil

from bench.fake_service import PORT, fake_service
from bench.harness import emit
from bench.wire import JSON, PROTO, Wire, batch, sample
from tests.api.local import MODEL

CALLS, WARM_UP = 300, 50
LOAD_S = 10.0


def verbs(wire: Wire) -> dict[str, Callable[[int], Any]]:
    session, model = wire.model()
    wire.post(
        "/create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL},
    )
    return {
        "session_heartbeat": lambda i: wire.post("/session_heartbeat", {"session_id": session}),
        "create_session": lambda i: wire.post("/create_session", {}),
        "forward_backward": lambda i: wire.done("/forward_backward", batch(model, i + 1)),
        "forward": lambda i: wire.done(
            "/forward_backward", batch(model, i + 10_000, forward_only=True)
        ),
        "optim_step": lambda i: wire.done("/optim_step", {"model_id": model, "seq_id": i + 20_000}),
        "save_weights_for_sampler": lambda i: wire.done(
            "/save_weights_for_sampler", {"model_id": model, "path": f"c{i}", "seq_id": i + 30_000}
        ),
        "asample": lambda i: wire.done("/asample", sample(f"{session}:sample:0", i)),
    }


def latency() -> dict[str, Any]:
    """Measure the latency of each verb. The backend takes no time, so all of it is overhead."""
    found = {}
    for name, call in verbs(Wire(PORT)).items():
        took = []
        for i in range(WARM_UP + CALLS):
            started = time.perf_counter()
            call(i)
            took.append(1e3 * (time.perf_counter() - started))
        cuts = statistics.quantiles(took[WARM_UP:], n=100)
        found[name] = {"added_ms_p50": round(cuts[49], 2), "added_ms_p99": round(cuts[98], 2)}
    return found


async def one_client(
    http: aiohttp.ClientSession, model: str, numbers: Iterator[int], until: float, took: list[float]
) -> None:
    while time.perf_counter() < until:
        seq_id = next(numbers)
        started = time.perf_counter()
        async with http.post(
            "/api/v1/forward_backward", data=batch(model, seq_id), headers=PROTO
        ) as answer:
            request_id = (await answer.json())["request_id"]
        body = json.dumps({"request_id": request_id})
        async with http.post(
            "/api/v1/retrieve_future", data=body, headers={**JSON, "accept": PROTO["content-type"]}
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        took.append(1e3 * (time.perf_counter() - started))


async def throughput(clients: int) -> dict[str, Any]:
    models = [Wire(PORT).model()[1] for _ in range(clients)]
    took: list[float] = []
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{PORT}", connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        started = time.perf_counter()
        await asyncio.gather(
            *(one_client(http, model, count(1), started + LOAD_S, took) for model in models)
        )
        seconds = time.perf_counter() - started
    cuts = statistics.quantiles(took, n=100)
    return {
        "clients": clients,
        "operations_per_s": round(len(took) / seconds),
        "ms_p50": round(cuts[49], 1),
        "ms_p99": round(cuts[98], 1),
    }


def resident() -> dict[str, float]:
    """Return the memory in MiB of the controller, and of the replicas and HAProxy together."""
    found = {"controller": 0.0, "edge": 0.0}
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        command = " ".join(process.info["cmdline"] or ())
        part = (
            "controller"
            if "AnsweringController" in command
            else "edge"
            if "ServeReplica" in command or "haproxy" in command
            else None
        )
        if part:
            found[part] += process.info["memory_info"].rss / 2**20
    return {name: round(size, 1) for name, size in found.items()}


async def memory(requests: int, clients: int = 2) -> dict[str, Any]:
    """Measure memory after each fifth of the requests.

    There are few clients, so that the 10,000 sequence numbers that are kept for a model are reached
    soon.
    """
    models = {Wire(PORT).model()[1]: count(1) for _ in range(clients)}
    readings = []
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{PORT}", connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        took: list[float] = []
        for share in range(1, 6):
            while 2 * len(took) < requests * share / 5:
                await asyncio.gather(
                    *(
                        one_client(http, model, numbers, time.perf_counter() + 2.0, took)
                        for model, numbers in models.items()
                    )
                )
            readings.append(resident())
    return {"requests": 2 * len(took), "resident_mib": readings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests",
        type=int,
        default=100_000,
        help="requests of the memory test; 0 = no memory test",
    )
    options = parser.parse_args()
    with fake_service("journal.retention_s=60"):
        for name, figures in latency().items():
            emit("latency", {"verb": name, **figures})
        for clients in (1, 16, 256):
            emit("latency", asyncio.run(throughput(clients)))
        if options.requests:
            emit("latency", asyncio.run(memory(options.requests)))


if __name__ == "__main__":
    main()
