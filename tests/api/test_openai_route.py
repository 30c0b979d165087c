"""OpenAI's routes with the real controller: samples whose client gets no answer end."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from tokenizers import Tokenizer, models

from skyrl_actors.api import schema
from skyrl_actors.config.cluster import HttpConfig, LimitsConfig
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import PartialSample, SampleOutput
from skyrl_actors.messages.weights import SamplerWeights
from tests.api.local import MODEL, AnsweringBackend, config_for, edge

URL = "http://service/v1/completions"


class Watched(AnsweringBackend):
    """Keeps which samples run. A streamed one has a token, and waits with the others for the rest."""

    def __init__(self, base_folder: str) -> None:
        super().__init__(base_folder)
        self.running: set[str] = set()
        self.begun = 0

    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, weights: SamplerWeights
    ) -> SampleOutput:
        self.running.add(request_id)
        self.begun += 1
        try:
            return await super().sample(request_id, prompt, params, weights)
        finally:
            self.running.discard(request_id)

    async def partial(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        if have:
            await asyncio.sleep(timeout_s)
        return PartialSample((7,), (-1.0,)) if not have else PartialSample()


@pytest.fixture
def backend(tmp_path: Path) -> Watched:
    Tokenizer(models.WordLevel({f"t{token}": token for token in range(320)}, "t0")).save(str(tmp_path / "tokenizer.json"))
    return Watched(str(tmp_path))


async def until(reached: Any) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110  the service does it in its own time
            await asyncio.sleep(0.01)


def body(*prompts: list[int], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompts), "max_tokens": 4, **more}


async def test_several_prompts_with_too_little_room_start_no_sample_for_nobody(tmp_path: Path, backend: Watched):
    backend.sampling.clear()
    async with edge(config_for(tmp_path, limits=LimitsConfig(open_requests=3, open_requests_per_key=3)), backend) as http:
        refused = await http.post(URL, json=body(*[[1, 2]] * 5))
        assert refused.status_code == 429
        await until(lambda: not backend.running)
        backend.sampling.set()
        answered = await http.post(URL, json=body(*[[1, 2]] * 3))
        assert len(answered.json()["choices"]) == 3


async def test_a_prompt_that_is_refused_ends_the_samples_of_those_before_it(tmp_path: Path, backend: Watched):
    backend.sampling.clear()
    async with edge(config_for(tmp_path), backend) as http:
        refused = await http.post(URL, json=body([1], [2], [10**6]))
        assert refused.status_code == 422 and "outside 0 to" in refused.text
        await until(lambda: not backend.running)


async def test_no_prompt_is_refused(tmp_path: Path, backend: Watched):
    async with edge(config_for(tmp_path), backend) as http:
        refused = await http.post(URL, json=body())
        assert refused.status_code == 422 and "prompt is empty" in refused.text


@asynccontextmanager
async def listening(http: httpx.AsyncClient) -> AsyncIterator[str]:
    """The same application behind a real socket."""
    transport: Any = http._transport
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(transport.app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([bound]))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1/completions"
        server.should_exit = True
        await serving


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_gone_takes_its_samples_with_it(tmp_path: Path, backend: Watched, stream: bool):
    backend.sampling.clear()
    async with edge(config_for(tmp_path), backend) as http, listening(http) as url:
        prompts = [[1, 2]] if stream else [[1, 2], [3, 4], [5]]
        async with httpx.AsyncClient() as client:
            asked = asyncio.create_task(client.post(url, json=body(*prompts, stream=stream)))
            await until(lambda: len(backend.running) == len(prompts))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not backend.running)
        assert backend.begun == len(prompts)


async def test_a_stream_whose_client_is_gone_before_its_first_word_ends(tmp_path: Path, backend: Watched):
    backend.sampling.clear()
    async with edge(config_for(tmp_path), backend) as http:
        transport: Any = http._transport
        content = json.dumps(body([1, 2], stream=True)).encode()
        sent = iter([{"type": "http.request", "body": content}])

        async def receive() -> dict[str, Any]:
            return next(sent, {"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            raise OSError("the connection is closed")

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "app": transport.app,
        }  # fmt: skip
        await asyncio.gather(transport.app(scope, receive, send), return_exceptions=True)
        await asyncio.sleep(0.05)
        await until(lambda: not backend.running)


@pytest.mark.parametrize("default", [False, True])
async def test_logprobs_are_of_the_temperature_that_the_request_or_the_config_names(
    tmp_path: Path, backend: Watched, default: bool
):
    """1 where neither says so; protobuf, JSON and OpenAI's form alike."""
    async with edge(config_for(tmp_path, http=HttpConfig(tempered_logprobs=default)), backend) as http:

        async def logprobs(temperature: float, **said: bool) -> set[float]:
            asked = ASKED | {"sampling_params": {"max_tokens": 2, "temperature": temperature}, **said}
            request_id = (await http.post("/asample", json=asked)).json()["request_id"]
            as_json = await http.post("/retrieve_future", json={"request_id": request_id})
            form = {"Accept": "application/x-protobuf"}
            as_proto = await http.post("/retrieve_future", json={"request_id": request_id}, headers=form)
            read = schema.SampleResponse.FromString(as_proto.content)
            completed = await http.post(URL, json=body([1, 2], temperature=temperature, logprobs=0, **said))
            found = [
                as_json.json()["sequences"][0]["logprobs"],
                np.frombuffer(read.sequences[0].logprobs, "<f4").tolist(),
                completed.json()["choices"][0]["logprobs"]["token_logprobs"],
            ]
            return {value for values in found for value in values}

        assert await logprobs(0.7) == {-2.0 if default else -1.0}
        assert await logprobs(0.7, tempered_logprobs=True) == {-2.0}
        assert await logprobs(0.7, tempered_logprobs=False) == {-1.0}
        assert await logprobs(1.0, tempered_logprobs=True) == await logprobs(0.0, tempered_logprobs=True) == {-1.0}


KEY = "tml-alice-0123456789"
ASKED = {"base_model": MODEL, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
ROOT_CAUSE = "rank 1 of policy died\nTraceback: prompt of another tenant"


async def test_who_waits_is_told_a_safe_sentence_and_not_what_operators_read(tmp_path: Path, backend: Watched):
    config = config_for(tmp_path, http=HttpConfig(api_keys=(f"alice={KEY}",), long_poll_s=0.05))
    async with edge(config, backend, **{"X-API-Key": KEY}) as http:
        backend.sampling.clear()
        request_id = (await http.post("/asample", json=ASKED)).json()["request_id"]
        backend.fault = lambda: ROOT_CAUSE  # type: ignore[method-assign]
        waiting = await http.post("/retrieve_future", json={"request_id": request_id})
        assert waiting.status_code == 408
        said = waiting.json()
        assert said["queue_state"] == "paused_capacity"
        assert said["queue_state_reason"] == "recovering: a part of the service is being restarted, and goes on by itself"


@pytest.mark.parametrize("keys", [(), (f"alice={KEY}",)])
async def test_last_lines_of_a_process_are_in_no_answer_where_keys_are(tmp_path: Path, backend: Watched, keys: tuple[str, ...]):
    async def fails(*_: Any) -> SampleOutput:
        raise InternalError(ROOT_CAUSE)

    backend.sample = fails  # type: ignore[method-assign]
    async with edge(config_for(tmp_path, http=HttpConfig(api_keys=keys)), backend, **{"X-API-Key": KEY}) as http:
        request_id = (await http.post("/asample", json=ASKED)).json()["request_id"]
        answers = [
            await http.post("/retrieve_future", json={"request_id": request_id}),
            await http.post(URL, json=body([1, 2])),
            await http.post(URL, json=body([1, 2], stream=True)),
        ]
        for answer in answers:
            assert "rank 1 of policy died" in answer.text
            assert ("another tenant" in answer.text) == (not keys)
