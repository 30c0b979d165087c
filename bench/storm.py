"""An overload: four waves of 512 samples, 512 forward_backward and 32 heartbeats.

    python -m bench.storm [--real]

The backend answers at once. With --real it is the tiny model and vLLM.

The waves are a second apart, and every answer is retrieved. No call may fail, and heartbeats must
be answered.
"""

import argparse
import asyncio
import json
import statistics
import time
from contextlib import AbstractContextManager
from typing import Any

import aiohttp

from bench.fake_service import PORT as FAKE_PORT
from bench.fake_service import fake_service
from bench.harness import PORT as REAL_PORT
from bench.harness import emit, service
from bench.wire import JSON, PROTO, batch, sample

WAVES, SAMPLES, BATCHES, HEARTBEATS, MODELS = 4, 512, 512, 32, 8
WAVE_S = 1.0
ANSWER_S = 900.0


class Storm:
    def __init__(self, http: aiohttp.ClientSession, base_model: str):
        self._http = http
        self._base_model = base_model
        self.models: list[str] = []
        self.session = ""
        self.took: dict[str, list[float]] = {"sample": [], "forward_backward": [], "heartbeat": []}
        self.errors: list[str] = []

    async def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, bytes]:
        content, kind = (
            (body, PROTO) if isinstance(body, bytes) else (json.dumps(body).encode(), JSON)
        )
        headers = {
            **kind,
            "accept": f"{PROTO['content-type']}, application/json",
            "x-api-key": "tml-bench",
        }
        async with self._http.post(f"/api/v1{path}", data=content, headers=headers) as answer:
            return answer.status, await answer.read()

    async def done(self, path: str, body: bytes | dict[str, Any]) -> bytes:
        status, content = await self.post(path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {content[:200]!r}")
        request_id = json.loads(content)["request_id"]
        while True:
            status, content = await self.post("/retrieve_future", {"request_id": request_id})
            if status == 200 and not content.startswith(b'{"error"'):
                return content
            if status != 408:
                raise RuntimeError(f"retrieve_future of {path}: {status} {content[:200]!r}")

    async def set_up(self) -> None:
        self.session = json.loads((await self.post("/create_session", {}))[1])["session_id"]
        for number in range(MODELS):
            body = {
                "session_id": self.session,
                "model_seq_id": number,
                "base_model": self._base_model,
                "lora_config": {"rank": 4},
            }
            await self.done("/create_model", body)
            self.models.append(f"{self.session}:train:{number}")
        body = {
            "session_id": self.session,
            "sampling_session_seq_id": 0,
            "base_model": self._base_model,
        }
        await self.post("/create_sampling_session", body)

    async def timed(self, kind: str, work: Any) -> None:
        started = time.perf_counter()
        try:
            await work
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            self.errors.append(f"{kind}: {type(error).__name__} {error}")
        self.took[kind].append(1e3 * (time.perf_counter() - started))

    async def beat(self) -> None:
        status, content = await self.post("/session_heartbeat", {"session_id": self.session})
        if status != 200:
            raise RuntimeError(f"{status} {content[:200]!r}")

    async def wave(self, number: int) -> None:
        await asyncio.sleep(number * WAVE_S)
        sampler = f"{self.session}:sample:0"
        works = [
            ("sample", self.done("/asample", sample(sampler, number * SAMPLES + i)))
            for i in range(SAMPLES)
        ]
        for i in range(BATCHES):
            body = batch(self.models[i % MODELS], number * BATCHES + i + 1)
            works.append(("forward_backward", self.done("/forward_backward", body)))
        works += [("heartbeat", self.beat()) for _ in range(HEARTBEATS)]
        await asyncio.gather(*(self.timed(kind, work) for kind, work in works))


async def storm(port: int, base_model: str) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as http:
        one = Storm(http, base_model)
        await one.set_up()
        started = time.perf_counter()
        await asyncio.gather(*(one.wave(number) for number in range(WAVES)))
        seconds = time.perf_counter() - started
    for error in one.errors[:5]:
        print(error)
    figures: dict[str, Any] = {
        "errors": len(one.errors),
        "requests": sum(map(len, one.took.values())),
        "seconds": round(seconds, 1),
    }
    for kind, took in one.took.items():
        cuts = statistics.quantiles(took, n=100)
        figures |= {f"{kind}_ms_p50": round(cuts[49]), f"{kind}_ms_p99": round(cuts[98])}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="the tiny model and vLLM")
    real = parser.parse_args().real
    made: AbstractContextManager[Any] = (
        service("base_model.warmup_steps=0") if real else fake_service()
    )
    with made:
        figures = asyncio.run(
            storm(
                REAL_PORT if real else FAKE_PORT, "skyrl-actors/tiny" if real else "Qwen/Qwen3-8B"
            )
        )
    emit(
        "storm",
        {"backend": "vLLM and one rank, tiny model" if real else "answers at once", **figures},
    )
    if figures["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
