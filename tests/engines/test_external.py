"""A real vLLM server by URL: samples of the base model and of adapters that the trainers save."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from pydantic import ValidationError

from skyrl_actors.backends.ray_backend import RayBackend
from skyrl_actors.config.base_models import PretrainedBase
from skyrl_actors.config.cluster import ClusterConfig, LoraConfig
from skyrl_actors.config.engines import EngineConfig, ExternalEngineConfig
from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.config.transfers import (
    FileTransferConfig,
    LogprobCheckConfig,
    StreamTransferConfig,
)
from skyrl_actors.engines.build import external_members
from skyrl_actors.engines.vllm_server import VllmServer
from skyrl_actors.messages.errors import ConfigError, InvalidRequest, StateLost
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.supervision import backoff
from tests.engines.test_transports import TOKENS, Tenant

KEY, BASE = "a-key-of-theirs", SamplerWeights(version="base")
PROMPT = tuple(TOKENS[:8].tolist())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def their_server(random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Start a vLLM server; yield its port. The server may still be starting."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "VLLM_API_KEY": KEY,
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(random_base),
        "--served-model-name",
        "theirs",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens",
        "1024",
        "--kv-cache-memory-bytes",
        str(32 * 2**20),
        "--max-num-seqs",
        "16",
    ]
    with (
        log.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            yield port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@asynccontextmanager
async def road(to_port: int, port: int) -> AsyncIterator[None]:
    """Forward connections on `port` to `to_port`; on exit, cut them."""
    ways: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                while data := await reader.read(2**16):
                    writer.write(data)
                    await writer.drain()
            finally:
                writer.close()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", to_port)
        except OSError:
            writer.close()
            return
        for pair in ((reader, back), (there, writer)):
            task = asyncio.create_task(carry(*pair))
            ways.add(task)
            task.add_done_callback(ways.discard)

    server = await asyncio.start_server(joined, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for way in list(ways):
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "BACKOFF_S", 0.2)


def config_for(base: Path, folder: Path, port: int) -> ClusterConfig:
    return ClusterConfig(
        name="external",
        base_model=PretrainedBase(name="tiny", path=base),
        policy=GroupConfig(microbatch_tokens=64),
        critic=None,
        engine=EngineConfig(
            num_engines=0,
            external=(
                ExternalEngineConfig(url=f"http://127.0.0.1:{port}/v1", api_key_env="THEIR_KEY"),
            ),
        ),
        lora=LoraConfig(max_rank=8),
        transfer=FileTransferConfig(folder=folder),
        logprob_check=LogprobCheckConfig(action="refuse"),
        restart=RestartConfig(max_in_a_row=8),
    )


async def _repeated(backend: RayBackend, request_id: str, *arguments: Any) -> SampleOutput:
    """Sample as the controller does: again after a loss of the engine."""
    while True:
        with suppress(StateLost):
            return await backend.sample(request_id, *arguments)


@pytest.mark.slow
async def test_adapters_are_sampled_by_a_server_by_url(
    their_server: int, random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("THEIR_KEY", KEY)
    port, said = free_port(), list[str]()
    await _answers(their_server)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    backend = RayBackend(
        config_for(random_base, tmp_path, port), random_base, said.append, detached=False
    )
    try:
        async with road(their_server, port):
            await backend.start(1)
            lora = Tenant(
                backend, ModelSpec(model_id="lora", base_model="tiny", lora=LoraSpec(rank=8))
            )
            await lora.create()
            await lora.train(2)
            wanted, pinned = await lora.logprobs(), await lora.freeze("lora@1")
            await lora.train(3)
            scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)
            prompt = tuple(TOKENS.tolist())
            found = await backend.sample("r1", prompt, scoring, pinned)
            assert found.version == "lora@1" and found.prompt_logprobs is not None
            np.testing.assert_allclose(found.prompt_logprobs[1:], wanted, atol=1e-4)
            later = await backend.sample("r2", prompt, scoring, await lora.freeze("lora@2"))
            assert (
                later.prompt_logprobs is not None
                and np.abs(later.prompt_logprobs[1:] - wanted).max() > 0.1
            )
            await _draws(backend)
            await _reads_along(backend)
            await _is_refused(backend, tmp_path)
            assert 0 < max(backend.parts.engines.logprob_check.differences) < 1e-4
        waiting = asyncio.create_task(_repeated(backend, "r7", prompt, scoring, pinned))
        await asyncio.sleep(0.3)
        assert not waiting.done() and backend.fault() is not None
        # The server still has the adapters, which this service does not know.
        async with road(their_server, port):
            again = await waiting
            assert again.prompt_logprobs is not None
            np.testing.assert_allclose(again.prompt_logprobs[1:], wanted, atol=1e-4)
            (engine,) = (await backend.status())["engines"]
            assert (
                engine["state"] == "HEALTHY" and engine["adapters"] == 1 and engine["restarts"] >= 1
            )
            await backend.close()
    finally:
        ray.shutdown()
    assert [text for text in said if "external[0] answers again" in text]


async def _answers(port: int) -> None:
    for _ in range(1500):  # a busy machine imports vLLM in minutes
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
            return
        await asyncio.sleep(0.2)
    raise AssertionError("the server did not start")


async def _draws(backend: RayBackend) -> None:
    params = SamplingParams(max_tokens=12, num_samples=2, seed=5, stop=(), topk_sample_logprobs=3)
    drawn = await backend.sample("r3", PROMPT, params, BASE)
    assert [len(s.tokens) for s in drawn.sequences] == [12, 12] and drawn.sequences[
        0
    ].stop_reason == "length"
    again = await backend.sample("r4", PROMPT, params, BASE)
    for here, there in zip(drawn.sequences, again.sequences, strict=True):
        assert here.tokens.tolist() == there.tokens.tolist()
        assert here.topk_ids is not None and here.topk_ids.shape == (12, 3)
        assert np.all(np.diff(here.topk_logprobs) <= 0)
    prompted = await backend.sample(
        "r4b",
        PROMPT,
        SamplingParams(max_tokens=1, topk_prompt_logprobs=2, prompt_logprobs_last_n=3),
        BASE,
    )
    assert prompted.topk_prompt_ids is not None and prompted.topk_prompt_ids.shape == (8, 2)
    assert (
        prompted.prompt_logprobs is not None
        and np.isnan(prompted.prompt_logprobs).tolist() == [True] * 5 + [False] * 3
    )
    greedy = await backend.sample(
        "r5",
        PROMPT,
        SamplingParams(max_tokens=1, temperature=0.0, topk_sample_logprobs=1, stop=()),
        BASE,
    )
    assert (
        greedy.sequences[0].topk_ids is not None
        and greedy.sequences[0].topk_ids[0, 0] == greedy.sequences[0].tokens[0]
    )
    assert greedy.sequences[0].topk_logprobs[0, 0] == greedy.sequences[0].logprobs[0]
    stop = int(drawn.sequences[0].tokens[4])
    stopped = await backend.sample(
        "r5b", PROMPT, SamplingParams(max_tokens=12, seed=5, stop=(stop,)), BASE
    )
    first = drawn.sequences[0].tokens.tolist().index(stop)
    assert stopped.sequences[0].tokens.tolist() == drawn.sequences[0].tokens.tolist()[: first + 1]
    assert stopped.sequences[0].stop_reason == "stop"


async def _reads_along(backend: RayBackend) -> None:
    params = SamplingParams(max_tokens=100, seed=6, stop=(), stream=True)
    running = asyncio.create_task(backend.sample("r6", PROMPT, params, BASE))
    early = await backend.partial("r6", 0, 20.0)
    whole = (await running).sequences[0]
    assert (
        0 < len(early.tokens) <= 100
        and list(early.tokens) == whole.tokens[: len(early.tokens)].tolist()
    )
    alone = await backend.sample(
        "r6b", PROMPT, SamplingParams(max_tokens=100, seed=6, stop=()), BASE
    )
    assert alone.sequences[0].tokens.tolist() == whole.tokens.tolist()


async def _is_refused(backend: RayBackend, folder: Path) -> None:
    full = Tenant(backend, ModelSpec(model_id="full", base_model="tiny"))
    await full.create()
    with pytest.raises(
        InvalidRequest, match="full weights can be sampled only by engines of this service"
    ):
        await full.freeze("full@1")
    with pytest.raises(InvalidRequest, match="maximum context length is 512 tokens"):
        await backend.sample("x1", PROMPT * 100, SamplingParams(max_tokens=1), BASE)
    nowhere = SamplerWeights(
        version="lora@9",
        parts=(
            WeightManifest(
                version="lora@9", kind="lora", path=str(folder / "nowhere"), num_bytes=0
            ),
        ),
    )
    with pytest.raises(InvalidRequest, match=r"lora@9 cannot be loaded from .*nowhere by http"):
        await backend.sample("x2", PROMPT, SamplingParams(max_tokens=1), nowhere)


async def test_a_server_that_is_not_usable_is_refused_with_the_reason():
    answers: dict[str, object] = {}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers or self.command == "GET" else 404)
            self.end_headers()
            self.wfile.write(
                json.dumps(answers[self.path]).encode()
                if self.path in answers
                else b"<html>welcome</html>"
            )

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}"
        await _fails(url, KEY, r"is not a vLLM server: GET /version answered 200 <html>")
        answers["/version"] = {"version": "0.9"}
        await _fails(url, KEY, r"is not a vLLM server: GET /v1/models answered 200 <html>")
        answers["/v1/models"] = {
            "data": [{"id": "m"}, {"id": "a", "parent": "m", "max_model_len": 8}]
        }
        await _fails(url, KEY, "serves no model")
        answers["/v1/models"] = {"data": [{"id": "m", "max_model_len": 8}]}
        choice = {"text": "a", "finish_reason": "length"}
        answers["/v1/completions"] = {"choices": [choice]}
        await _fails(url, KEY, "cannot sample by tokens, which vLLM does since .* lacks token_ids")
        answers["/v1/completions"] = {
            "choices": [choice | {"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}]
        }
        await _fails(url, KEY, "loads no adapters: start it with --enable-lora")
        page.shutdown()
    await _fails(f"http://127.0.0.1:{free_port()}", KEY, "does not answer: ConnectError")


@pytest.mark.slow
async def test_a_real_server_is_refused_for_a_wrong_key_or_model(their_server: int):
    await _answers(their_server)
    await _fails(
        f"http://127.0.0.1:{their_server}",
        "wrong",
        "needs an API key: name its variable in api_key_env",
    )


async def _fails(url: str, key: str, said: str) -> None:
    server = VllmServer(url, key, 10.0)
    with pytest.raises(ConfigError, match=said):
        await server.identify()
    await server.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": {"num_engines": 0}}, "nothing could sample"),
        ({"engine": {"external": [{"url": "localhost:8000"}]}}, "use http://host:port"),
        (
            {"engine": {"external": [{"url": "http://a"}, {"url": "http://a/v1"}]}},
            "names a URL twice",
        ),
        (
            {
                "engine": {"external": [{"url": "http://a"}]},
                "transfer": StreamTransferConfig(type="gloo"),
            },
            "gloo does not reach engine.external",
        ),
        (
            {"engine": {"num_engines": 0, "external": [{"url": "http://a"}], "in_flight": "keep"}},
            "num_engines is 0",
        ),
        ({"engine": {"in_flight": "keep"}, "placement": {"layout": "split"}}, "leave it out"),
        ({"engine": {"in_flight": "keep", "sleep_level": "2"}}, "sleep_level 2 drops them"),
    ],
)
def test_a_config_that_cannot_work_is_refused(options: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        ClusterConfig.model_validate(options)


async def test_an_engine_by_url_without_its_key_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("THEIR_KEY", raising=False)
    config = config_for(Path("base"), Path("exports"), 1)
    with pytest.raises(ConfigError, match="the controller has no variable THEIR_KEY"):
        external_members(config, lambda text: None)
