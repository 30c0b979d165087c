"""Request bodies: limits of size and parts, and decoding outside the event loop."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from skyrl_actors.api import compression, cpu_bound, openai_wire, schema, state, wire
from skyrl_actors.api.app import room_for
from skyrl_actors.api.body_limits import (
    SMALL_BYTES,
    check_chat,
    check_completion,
    check_sample,
    limit_of,
)
from skyrl_actors.api.parts import check_json_size, check_proto_size
from skyrl_actors.backends.backend import Capabilities, ServedModels
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.messages.columns import MAX_DATUMS
from skyrl_actors.messages.errors import InvalidRequest, Unavailable
from skyrl_actors.transport.byte_budget import ByteBudget
from tests.api.local import config_for, edge, posted

LIMITS = LimitsConfig()


@pytest.mark.parametrize(
    ("path", "most"),
    [
        ("/api/v1/forward_backward", 64 * 2**20),
        ("/api/v1/optim_step", SMALL_BYTES),
        ("/api/v1/create_session", SMALL_BYTES),
        ("/api/v1/asample", SMALL_BYTES + 512 * 1000),
        ("/v1/chat/completions", SMALL_BYTES + 64 * 1000),
    ],
)
def test_the_body_limit_of_a_route_depends_on_the_model(path: str, most: int):
    able = Capabilities(
        base_model="tiny",
        base_folder="/m",
        vocab_size=320,
        max_context_tokens=1000,
        max_sample_tokens=1000,
        roles=("policy",),
    )
    assert limit_of(path, LIMITS, ServedModels((able,))) == most


async def test_a_body_above_the_limit_of_its_route_is_refused(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        answer = await http.post(
            "/optim_step", json={"model_id": "m", "user_metadata": {"x": "y" * SMALL_BYTES}}
        )
        assert answer.status_code == 413 and str(SMALL_BYTES) in answer.text


def empty_datums(count: int) -> bytes:
    return b"\x1a\x00" * count


def datum_of_empty_chunks(count: int) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="m")
    datum = message.data.add()
    for _ in range(count):
        datum.model_input.add()
    return message.SerializeToString()


def tensor_of_many_dimensions(count: int) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="m")
    message.data.add().loss_fn_inputs["weights"].shape.extend([1] * count)
    return message.SerializeToString()


def many_options(count: int) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="m")
    for i in range(count):
        message.loss_fn_config[str(i)] = 1.0
    return message.SerializeToString()


@pytest.mark.parametrize(
    "body", [empty_datums, datum_of_empty_chunks, tensor_of_many_dimensions, many_options]
)
def test_a_body_of_many_small_parts_is_refused_before_it_is_decoded(body: Callable[[int], bytes]):
    with pytest.raises(InvalidRequest, match=r"more than \d+ fields"):
        check_proto_size(body(600_000))


def test_a_full_batch_is_within_the_limit_of_parts():
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=7, loss_fn="ppo")
    for _ in range(MAX_DATUMS):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(400)
        for name in ("target_tokens", "weights", "advantages", "logprobs"):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = bytes(400), schema.FLOAT32
            tensor.shape.append(100)
    check_proto_size(message.SerializeToString())


@pytest.mark.parametrize(
    "body", [b"\x1a\xff\xff\xff\x7f", b"\x1a", b"\xff" * 100, b"\x1b\x00", b"\x19\x00"]
)
def test_a_truncated_body_is_refused(body: bytes):
    with pytest.raises(InvalidRequest, match="ends within a field"):
        check_proto_size(empty_datums(40_000) + body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"[{}" + b",{}" * 700_000 + b"]", "lists and objects"),
        (b"[0" + b",0" * 3_000_000 + b"]", "values"),
    ],
)
def test_json_of_many_small_parts_is_refused_before_it_is_parsed(body: bytes, expected: str):
    with pytest.raises(InvalidRequest, match=expected):
        check_json_size(body, 8 * 2**20)


async def test_large_json_is_decoded_equally_in_another_process(tmp_path: Path):
    assert await cpu_bound.run_in_process(os.getpid) != os.getpid()
    tokens = np.arange(300).tolist()
    tensor = {"data": tokens, "dtype": "int64", "shape": [300]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": tensor},
    }
    async with edge(config_for(tmp_path)) as http:
        session = (await posted(http, "/create_session", sdk_version="0.3.0"))["session_id"]
        made = await posted(
            http, "/create_model", session_id=session, model_seq_id=0, base_model="Qwen/Qwen3-8B"
        )
        model_id = made["model_id"]
        answers = []
        for count in (2, 700):
            body = {
                "model_id": model_id,
                "forward_backward_input": {"data": [datum] * count, "loss_fn": "cross_entropy"},
            }
            assert (len(json.dumps(body)) > cpu_bound.PROCESS_BYTES) == (count == 700)
            future = await posted(http, "/forward_backward", **body)
            answers.append(await posted(http, "/retrieve_future", request_id=future["request_id"]))
        assert [answer["metrics"]["loss:sum"] for answer in answers] == [600.0, 210_000.0]
        assert answers[1]["loss_fn_outputs"][699] == answers[0]["loss_fn_outputs"][0], (
            "rendered apart, and the same"
        )


@pytest.mark.parametrize(
    "run, places", [(cpu_bound.run_in_process, 1), (cpu_bound.run_in_thread, cpu_bound.THREADS)]
)
async def test_a_key_with_many_large_requests_lets_others_take_turns(run: Any, places: int):
    ended: list[str] = []
    await run(os.getpid)  # the process runs

    async def asked(owner: str) -> None:
        cpu_bound.OWNER.set(owner)
        await run(time.sleep, 0.1)
        ended.append(owner)

    busy = [asyncio.create_task(asked("busy")) for _ in range(4 * places)]
    await asyncio.sleep(0.05)
    await asyncio.gather(*busy, asked("other"))
    assert ended.index("other") <= 2 * places - 1


async def test_requests_that_are_ended_count_for_their_key(monkeypatch: pytest.MonkeyPatch):
    """Otherwise a key with slow requests would have the next turn again and again."""
    await cpu_bound.run_in_process(os.getpid)  # the process runs
    ended: list[str] = []

    async def asked(owner: str, seconds: float) -> None:
        cpu_bound.OWNER.set(owner)
        try:
            await cpu_bound.run_in_process(time.sleep, seconds)
            ended.append(owner)
        except Unavailable:
            ended.append("too slow")

    with monkeypatch.context() as short:
        short.setattr(cpu_bound, "DEADLINE_S", 0.5)
        asked_first = asyncio.create_task(asked("slow", 60.0))
        await asyncio.sleep(0.1)
    later = [asyncio.create_task(asked(owner, 0.1)) for owner in ("slow", "other", "slow")]
    await asyncio.gather(asked_first, *later)
    assert ended == ["too slow", "other", "slow", "slow"]


def _dies() -> None:
    os._exit(3)


async def test_a_decoding_process_that_dies_is_replaced():
    with pytest.raises(Unavailable, match="died"):
        await cpu_bound.run_in_process(_dies)
    assert await cpu_bound.run_in_process(os.getpid) != os.getpid()


async def test_errors_of_a_large_body_equal_those_of_a_small_one(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        for pad in (0, SMALL_BYTES):
            body: dict[str, Any] = {
                "prompt": {"chunks": [], "pad": "x" * pad},
                "num_samples": "many",
            }
            answer = await http.post("/asample", json=body)
            assert answer.status_code == 422 and answer.json()["detail"].startswith("num_samples: ")
        answer = await http.post("/asample", content=b"{")
        assert answer.status_code == 422 and "JSON" in answer.json()["detail"]


async def test_bodies_wait_for_memory_and_one_key_gets_at_most_half():
    room = ByteBudget(4 * 2**20, SMALL_BYTES)
    large = 2 * 2**20
    first = await room.take("a", large)
    second = asyncio.create_task(room.take("a", large))
    await asyncio.sleep(0)
    assert not second.done(), "half of the memory is reserved for other keys"
    async with asyncio.timeout(1):
        of_another = await room.take("b", large)
        (await room.take("b", SMALL_BYTES)).release()
    of_another.release()
    first.release()
    first.release()
    await asyncio.wait_for(second, 1)
    assert room.taken == large


async def test_a_lease_times_out_without_memory_and_a_larger_one_is_taken_alone():
    room = ByteBudget(4 * 2**20, SMALL_BYTES)
    lease = await room.take("", 4 * 2**20)
    with pytest.raises(TimeoutError):
        await room.take("", 2 * 2**20, 0.05)
    lease.release()
    await asyncio.wait_for(room.take("", 10 * 2**20), 1)


async def test_a_body_without_memory_is_refused_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.api.app.PATIENCE_S", 0.05)
    monkeypatch.setattr("skyrl_actors.api.state.BODY_MEMORY_BYTES", 4 * 2**20)
    async with edge(config_for(tmp_path, limits=LimitsConfig(body_bytes=2**20))) as http:
        transport: Any = http._transport
        lease = await transport.app.state.api.body_budget.take("", 4 * 2**20)
        answer = await http.post("/forward_backward", content=b"x" * 2**20)
        assert answer.status_code == 429 and "bytes of request bodies" in answer.text
        assert answer.headers["Retry-After"] == "1"
        lease.release()


async def test_a_body_that_does_not_arrive_releases_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.api.app.BODY_S", 0.1)
    monkeypatch.setattr("skyrl_actors.api.state.BODY_MEMORY_BYTES", 2**20)
    async with edge(config_for(tmp_path, limits=LimitsConfig(body_bytes=2**20))) as http:

        async def never() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        stuck = await asyncio.wait_for(http.post("/forward_backward", content=never()), 10)
        assert stuck.status_code == 408 and "did not arrive" in stuck.text
        answer = await asyncio.wait_for(
            http.post("/forward_backward", content=b"x" * (SMALL_BYTES + 1)), 10
        )
        assert answer.status_code == 422, "the memory is free again"


@pytest.mark.parametrize(
    ("headers", "room"),
    [
        ({"content-length": "1000"}, 1000),
        ({"content-length": "1000", "content-encoding": "zstd"}, 16_000),
        ({"content-length": "90000", "content-encoding": "zstd"}, 10**6),
        ({"transfer-encoding": "chunked"}, 10**6),
    ],
)
def test_the_memory_of_a_body_is_estimated_from_its_headers(headers: dict[str, str], room: int):
    assert room_for(headers, 10**6) == room


async def test_prompts_that_are_too_long_or_too_many_are_refused_when_parsed(
    tmp_path: Path,
):
    long: dict[str, Any] = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 600}]},
        "base_model": "Qwen/Qwen3-8B",
    }
    with pytest.raises(InvalidRequest, match="600 tokens"):
        check_sample(wire.Asample.model_validate(long), 512, 256)
    empty = {**long, "prompt": {"chunks": [{"type": "encoded_text", "tokens": []}] * 513}}
    with pytest.raises(InvalidRequest, match="has 513 chunks"):
        check_sample(wire.Asample.model_validate(empty), 512, 256)
    many = openai_wire.Completion(model="m", prompt=["a"] * 300)
    with pytest.raises(
        InvalidRequest, match=r"300 prompts .* at most 256 \(limits.samples_in_flight\)"
    ):
        check_completion(many, 512, 256)
    async with edge(config_for(tmp_path)) as http:
        answer = await http.post("/asample", json=long)
        assert answer.status_code == 422 and "600 tokens" in answer.text


def test_conversations_of_many_messages_are_within_the_limit_of_parts():
    message = schema.ForwardBackwardRequest(model_id="m")
    for _ in range(MAX_DATUMS):
        datum = message.data.add()
        for _ in range(40):
            datum.model_input.add().encoded_text.tokens = bytes(40)
    check_proto_size(message.SerializeToString())


async def test_metadata_is_limited(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        for size, status in ((16_000, 200), (17_000, 422)):
            body = {"sdk_version": "0.3.0", "user_metadata": {"note": "x" * size}}
            answer = await http.post("/create_session", json=body)
            assert answer.status_code == status, answer.text
        assert "at most 16384 are taken" in answer.text


async def test_a_compressed_body_takes_memory_for_what_it_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """64 MiB of spaces are 2 KB when they are compressed."""
    taken: list[int] = []
    plain = b" " * 2**24
    whole = zstandard.compress(plain)
    maker = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    unsized = maker.compress(plain) + maker.flush()
    config = config_for(tmp_path)
    async with edge(config) as http:
        budget = http._transport.app.state.api.body_budget  # type: ignore[attr-defined]

        def seen(body: bytes, limit: int) -> bytes:
            taken.append(budget.taken)
            return b"{}"

        monkeypatch.setattr(compression, "decompress", seen)
        for body in (whole, unsized):
            headers = {"content-encoding": "zstd", "content-type": "application/x-protobuf"}
            await http.post("/forward_backward", content=body, headers=headers)
        assert len(whole) < 4096 and taken == [len(plain), config.limits.body_bytes]
        budget.limit = 2**20
        first = await budget.take("", 2**20)
        monkeypatch.setattr(state, "PATIENCE_S", 0.05)
        refused = await http.post("/forward_backward", content=whole, headers=headers)
        assert refused.status_code == 429 and "when it is decoded" in refused.text
        first.release()
        assert not budget.taken


async def test_a_body_of_many_faults_has_a_short_answer(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        many = await http.post(
            "http://localhost/v1/completions", json={"model": "m", "prompt": [{}, *[None] * 2000]}
        )
        some = await http.post(
            "http://localhost/v1/chat/completions", json={"model": "m", "messages": [{}] * 30}
        )
        first = await http.post("/create_session", json={"tags": [1] * 5000})
    assert (many.status_code, some.status_code, first.status_code) == (400, 400, 422)
    assert "faults" in many.text and "and 10 more" in some.text
    assert first.json()["detail"] == "tags.0: Input should be a valid string"
    assert max(len(many.text), len(some.text)) < 4000


async def test_stop_texts_are_few_and_short(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        for stop in ("a" * 1001, ["a"] * 17):
            body = {"model": "m", "prompt": [1], "stop": stop}
            assert (
                await http.post("http://localhost/v1/completions", json=body)
            ).status_code == 400


CHAT = {"model": "m", "messages": [{"role": "user", "content": "h"}]}
TOOL = {"type": "function", "function": {"name": "a"}}
PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": CHAT["messages"] * 8193}, "8193 are given, and at most 8192"),
        ({"messages": [{"role": "user", "content": [PART] * 8192}]}, "messages, parts and tool"),
        ({"tools": [TOOL] * 129}, "tools: 129 are given, and at most 128"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"x": [[]] * 20_000}},
                    }
                ]
            },
            "values in parameters",
        ),
        ({"chat_template_kwargs": {"x": [0] * 20_000}}, "chat_template_kwargs: values"),
        ({"logit_bias": {str(n): 1.0 for n in range(20_001)}}, "logit_bias: tokens"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"x": [[]] * 20_000}},
                }
            },
            "values in the schema",
        ),
    ],
)
def test_chats_with_very_many_parts_are_refused_when_parsed(fields: dict[str, Any], said: str):
    body = openai_wire.ChatCompletion.model_validate({**CHAT, **fields})
    with pytest.raises(InvalidRequest, match=said):
        check_chat(body, 512, 256)


def test_very_many_targets_are_refused_when_parsed():
    targets = {"dtype": "int64", "shape": [1, 2**18 + 1], "data": [1] * (2**18 + 1)}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = wire.Asample.model_validate({"prompt": prompt, "target_prompt_logprobs": targets})
    with pytest.raises(InvalidRequest, match="target_prompt_logprobs has 262147 numbers"):
        check_sample(body, 512, 256)
