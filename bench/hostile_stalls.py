"""The latency of one API key's small calls while another key sends the worst accepted bodies.

    python -m bench.hostile_stalls [--seconds 20]

The backend of the service answers at once, and the rest is real. The clients of the other key run
in a separate process. Four bodies at a time are sent, and the kinds alternate.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from bench.fake_service import PORT, fake_service
from bench.harness import emit
from bench.wire import JSON, PROTO, batch
from skyrl_actors.api import schema
from tests.api.local import MODEL

VICTIM, ATTACKER = "tml-victim", "tml-attacker"
ATTACKERS = 4
CALM_S, REST_S = 8.0, 2.0
ROWS, ROW_TOKENS = 1024, 320
MIB = 2**20
Body = tuple[str, bytes, dict[str, str]]  # path, content, headers


def large_json(model_id: str) -> Body:
    """Return a body of valid form with 60 MiB of numbers."""
    numbers = "1" + ",1" * (15 * 2**20)
    chunk = f'{{"type":"encoded_text","tokens":[{numbers}]}}'
    targets = '{"target_tokens":{"data":[1],"dtype":"int64"}}'
    data = f'[{{"model_input":{{"chunks":[{chunk}]}},"loss_fn_inputs":{targets}}}]'
    forward_backward = f'{{"data":{data},"loss_fn":"cross_entropy"}}'
    body = f'{{"model_id":"{model_id}","forward_backward_input":{forward_backward}}}'
    return "/forward_backward", body.encode(), JSON


def empty_objects(model_id: str) -> Body:
    body = f'{{"model_id":"{model_id}","forward_backward_input":{{"data":[{{}}' + ",{}" * (
        20 * MIB // 3
    )
    return "/forward_backward", (body + '],"loss_fn":"x"}}').encode(), JSON


def empty_datums(model_id: str) -> Body:
    return "/forward_backward", b"\x1a\x00" * (2 * MIB), PROTO


def long_prompt(model_id: str) -> Body:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 60_000}]}
    return "/asample", json.dumps({"base_model": MODEL, "prompt": prompt}).encode(), JSON


def huge_prompt(model_id: str) -> Body:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * (20 * MIB)}]}
    return "/asample", json.dumps({"base_model": MODEL, "prompt": prompt}).encode(), JSON


def long_text(model_id: str) -> Body:
    return (
        "/../../v1/completions",
        json.dumps({"model": MODEL, "prompt": "word " * 50_000}).encode(),
        JSON,
    )


def whole_batch(model_id: str) -> Body:
    """Return a batch with the largest accepted number of datums. Its answer is JSON."""
    message = schema.ForwardBackwardRequest(model_id=model_id, loss_fn="cross_entropy")
    for _ in range(ROWS):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * ROW_TOKENS
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = b"\2\0\0\0\0\0\0\0" * ROW_TOKENS, schema.INT64
    return "/forward_backward", message.SerializeToString(), PROTO


KINDS: list[Callable[[str], Body]] = [
    large_json,
    empty_objects,
    empty_datums,
    long_prompt,
    huge_prompt,
    long_text,
    whole_batch,
]


def session_of(key: str) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{PORT}", headers={"x-api-key": key}, timeout=timeout
    )


async def posted(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    content, headers = (
        (body, PROTO) if isinstance(body, bytes) else (json.dumps(body).encode(), JSON)
    )
    async with http.post(f"/api/v1{path}", data=content, headers=headers) as answer:
        found = await answer.read()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {found[:300]!r}")
        return json.loads(found)


async def made_model(http: aiohttp.ClientSession) -> tuple[str, str]:
    session = (await posted(http, "/create_session", {}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    future = await posted(http, "/create_model", body)
    await posted(http, "/retrieve_future", {"request_id": future["request_id"]})
    return session, future["model_id"]


async def attack(counts: Any, stop: Any) -> None:
    async with session_of(ATTACKER) as http:
        _, model_id = await made_model(http)
        bodies = [kind(model_id) for kind in KINDS]

        async def one(first: int) -> None:
            turn = first
            while not stop.is_set():
                which = turn % len(bodies)
                path, content, headers = bodies[which]
                url = path.removeprefix("/../..") if path.startswith("/../..") else f"/api/v1{path}"
                try:
                    async with http.post(url, data=content, headers=headers) as answer:
                        found = await answer.read()
                    if answer.status == 200 and b"request_id" in found:
                        wanted = json.dumps({"request_id": json.loads(found)["request_id"]})
                        for _ in range(3):  # each poll renders the answer
                            async with http.post(
                                "/api/v1/retrieve_future", data=wanted, headers=JSON
                            ) as polled:
                                await polled.read()
                except (aiohttp.ClientError, TimeoutError):
                    pass  # the service refused it before the end of its body
                counts[which] += 1
                turn += 1

        await asyncio.gather(*(one(i * 2) for i in range(ATTACKERS)))


def attack_in_process(counts: Any, stop: Any) -> None:
    asyncio.run(attack(counts, stop))


async def small_calls(seconds: float) -> dict[str, float]:
    """Return milliseconds of heartbeats and of small forward_backwards with their answers.

    Two clients of one key send them.
    """
    until = time.perf_counter() + seconds
    beats: list[float] = []
    batches: list[float] = []
    async with session_of(VICTIM) as http:
        session, model_id = await made_model(http)

        async def beat() -> None:
            while time.perf_counter() < until:
                started = time.perf_counter()
                await posted(http, "/session_heartbeat", {"session_id": session})
                beats.append(1e3 * (time.perf_counter() - started))
                await asyncio.sleep(0.02)

        async def train() -> None:
            number = 0
            while time.perf_counter() < until:
                number += 1
                started = time.perf_counter()
                future = await posted(http, "/forward_backward", batch(model_id, number))
                await posted(http, "/retrieve_future", {"request_id": future["request_id"]})
                batches.append(1e3 * (time.perf_counter() - started))
                await asyncio.sleep(0.02)

        await asyncio.gather(beat(), train())
    cuts = statistics.quantiles(beats, n=100)
    return {
        "heartbeat_ms_p50": round(cuts[49], 1),
        "heartbeat_ms_p99": round(cuts[98], 1),
        "heartbeat_ms_max": round(max(beats), 1),
        "forward_backward_ms_p50": round(statistics.median(batches), 1),
        "forward_backward_ms_p99": round(statistics.quantiles(batches, n=100)[98], 1),
    }


def run(seconds: float = 20.0) -> dict[str, Any]:
    with fake_service(f"http.api_keys=[{VICTIM},{ATTACKER}]"):
        asyncio.run(small_calls(REST_S))  # warm
        calm = asyncio.run(small_calls(CALM_S))
        spawn = multiprocessing.get_context("spawn")
        counts, stop = spawn.Array("i", len(KINDS), lock=False), spawn.Event()
        attacker = spawn.Process(target=attack_in_process, args=(counts, stop))
        attacker.start()
        try:
            while sum(counts) < len(KINDS):  # until each kind was sent
                time.sleep(0.2)
            before = list(counts)
            attacked = asyncio.run(small_calls(seconds))
            sent = [after - first for after, first in zip(counts, before, strict=True)]
        finally:
            stop.set()
            attacker.join(60)
            attacker.kill()
        ratio = attacked["forward_backward_ms_p50"] / calm["forward_backward_ms_p50"]
        bodies = {kind.__name__: count for kind, count in zip(KINDS, sent, strict=True)}
        return {
            "calm": calm,
            "attacked": attacked,
            "forward_backward_ratio": round(ratio, 2),
            "bodies": bodies,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    emit("hostile_stalls", run(parser.parse_args().seconds))
