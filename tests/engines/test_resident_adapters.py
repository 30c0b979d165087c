"""Adapters in an engine's memory: none in use is dropped, and nobody waits for another's files."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_actors.config.cluster import EngineConfig, RestartConfig
from skyrl_actors.config.engines import ExternalEngineConfig
from skyrl_actors.engines import vllm_adapters
from skyrl_actors.engines.deadlines import PausableDeadlines
from skyrl_actors.engines.external_engine import ExternalEngine
from skyrl_actors.engines.interface import EngineProcess, EngineSpec
from skyrl_actors.engines.resident_adapters import ResidentAdapters
from skyrl_actors.engines.vllm_engine import VllmEngine
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import WeightManifest


def adapter(folder: Path, name: str) -> WeightManifest:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_config.json").write_text("{}")
    tensors = {"base_model.model.q.lora_A.weight": np.ones((1, 2), np.float32)}
    save_file(tensors, folder / name / "adapter_model.safetensors")
    return WeightManifest(version=f"{name}@1", kind="lora", path=str(folder / name), num_bytes=1)


class Vllm:
    """What vLLM does with adapters: beyond `most` it drops one that it chooses itself."""

    def __init__(self, most: int):
        self.held: dict[int, str] = {}
        self._most = most

    async def add_lora(self, request: Any) -> None:
        assert len(self.held) < self._most, "vLLM would drop one by itself"
        self.held[request.lora_int_id] = request.lora_name

    async def remove_lora(self, number: int) -> None:
        del self.held[number]


def engine_with(vllm: Vllm, most: int = 2) -> Any:
    spec = EngineSpec(
        name="e",
        base_folder="/nowhere",
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_bytes=2**20,
        max_loras=most,
        max_lora_rank=8,
        max_adapters=most,
        enforce_eager=True,
        call_timeout_s=60.0,
    )
    engine: Any = VllmEngine(spec)
    engine._loaded, engine._llm = "base", vllm
    return engine


@pytest.fixture(autouse=True)
def no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_actors.engines.vllm_engine.base_parts", lambda _: ())


async def test_the_least_recently_used_adapter_makes_room(tmp_path: Path):
    vllm = Vllm(2)
    engine = engine_with(vllm)
    for name in ("a", "b", "a", "c"):
        one = adapter(tmp_path, name)
        request = await engine._prepare(one, "base")
        assert vllm.held[request.lora_int_id] == one.version
        engine._adapters.release(one)
    assert set(vllm.held.values()) == {"a@1", "c@1"}
    assert engine._adapters.resident.versions == ("a@1", "c@1")


async def test_an_adapter_in_use_stays_and_another_waits(tmp_path: Path):
    vllm = Vllm(2)
    engine = engine_with(vllm)
    a, b, c = (adapter(tmp_path, name) for name in "abc")
    for one in (a, a, b):
        await engine._prepare(one, "base")
    third = asyncio.ensure_future(engine._prepare(c, "base"))
    await asyncio.wait((third,), timeout=0.2)
    assert not third.done() and set(vllm.held.values()) == {"a@1", "b@1"}
    engine._adapters.release(a)  # another sample uses it still
    await asyncio.wait((third,), timeout=0.2)
    assert not third.done()
    await asyncio.wait_for(engine._prepare(None, "base"), 5)  # those without wait for nothing
    engine._adapters.release(b)
    await asyncio.wait_for(third, 5)
    assert set(vllm.held.values()) == {"a@1", "c@1"}


async def test_overlapping_samples_of_one_adapter_do_not_starve_another(tmp_path: Path):
    engine = engine_with(Vllm(1), most=1)
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "b")
    served = 0

    async def sample() -> None:
        nonlocal served
        await engine._prepare(a, "base")
        await asyncio.sleep(0.02)
        engine._adapters.release(a)
        served += 1

    async def keep_on() -> None:
        while True:
            await sample()

    clients = [asyncio.ensure_future(keep_on())]
    await asyncio.sleep(0.01)
    clients.append(asyncio.ensure_future(keep_on()))  # there is always a sample of a
    while served < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.wait_for(engine._prepare(b, "base"), 5)
    before = served
    engine._adapters.release(b)
    while served < before + 4:  # noqa: ASYNC110  and those of a go on
        await asyncio.sleep(0.01)
    for client in clients:
        client.cancel()


async def test_a_sample_that_stops_waiting_for_room_lets_others_in(tmp_path: Path):
    engine = engine_with(Vllm(1), most=1)
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "b")
    await engine._prepare(a, "base")
    waiter = asyncio.ensure_future(engine._prepare(b, "base"))
    await asyncio.wait((waiter,), timeout=0.1)
    behind = asyncio.ensure_future(engine._prepare(a, "base"))
    await asyncio.wait((behind,), timeout=0.1)
    assert not waiter.done() and not behind.done()
    waiter.cancel()
    await asyncio.wait_for(behind, 5)


async def test_a_wait_for_room_ends_and_says_who_has_it(tmp_path: Path):
    engine = engine_with(Vllm(1), most=1)
    engine._deadlines._seconds = 0.1
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "b")
    await engine._prepare(a, "base")
    with pytest.raises(InternalError, match=r"adapter b@1 found no room in time: .* use a@1"):
        await engine._prepare(b, "base")
    await asyncio.wait_for(engine._prepare(a, "base"), 5)  # nobody waits for its place any more


async def test_an_adapter_whose_sample_is_cancelled_during_the_load_is_known(tmp_path: Path):
    vllm, begun, loaded = Vllm(2), asyncio.Event(), asyncio.Event()
    engine, add = engine_with(vllm), vllm.add_lora

    async def slow(request: Any) -> None:
        begun.set()
        await loaded.wait()
        await add(request)

    engine._llm.add_lora = slow
    first = asyncio.ensure_future(engine._prepare(adapter(tmp_path, "a"), "base"))
    await begun.wait()
    first.cancel()
    loaded.set()
    await asyncio.wait((first,))
    assert first.cancelled() and set(vllm.held.values()) == {"a@1"}
    assert engine._adapters.resident.versions == ("a@1",)
    for name in "bc":  # vLLM never has to drop one by itself
        one = adapter(tmp_path, name)
        await engine._prepare(one, "base")
        engine._adapters.release(one)
    assert set(vllm.held.values()) == {"b@1", "c@1"}


async def test_files_that_are_gone_when_they_are_needed_again_refuse_one_sample(tmp_path: Path):
    vllm = Vllm(1)
    engine = engine_with(vllm, most=1)
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "b")
    for one in (a, b):
        await engine._prepare(one, "base")
        engine._adapters.release(one)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"a@1 .*missing or damaged"):
        await engine._prepare(a, "base")
    assert set(vllm.held.values()) == {"b@1"} and not engine.dead.is_set()
    await engine._prepare(b, "base")
    assert adapter(tmp_path, "a") == a  # written again
    engine._adapters.release(b)
    await engine._prepare(a, "base")


async def waited(slow: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> bool:
    """Return whether `other` ended while `slow`, which began before it, did not."""
    first = asyncio.ensure_future(slow)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(other, 20)
    before = not first.done()
    await first
    return before


async def test_files_of_one_adapter_hold_up_no_other_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vllm_adapters, "check_adapter", lambda *_: time.sleep(1.0))
    engine = engine_with(Vllm(2))
    assert await waited(
        engine._prepare(adapter(tmp_path, "a"), "base"), engine._prepare(None, "base")
    )


async def test_a_load_on_a_server_by_url_holds_up_no_other_sample(tmp_path: Path):
    loads: list[str] = []

    async def load(name: str, path: str) -> None:
        loads.append(name)
        if name == "slow@1":
            await asyncio.sleep(1.0)

    async def at_once(*_: Any) -> str:
        return "answer"

    where = ExternalEngineConfig(url="http://127.0.0.1:9/v1")
    engine: Any = ExternalEngine("e", where, None, EngineConfig(), RestartConfig(), print)
    engine.server = SimpleNamespace(load_adapter=load, complete=at_once)
    engine.health = "HEALTHY"

    def sample(one: WeightManifest) -> Any:
        params = SamplingParams(max_tokens=1)
        return engine.ask(EngineProcess.sample, "1.0", (1,), params, one, one.version)

    fast, slow = adapter(tmp_path, "fast"), adapter(tmp_path, "slow")
    await sample(fast)
    assert await waited(sample(slow), sample(fast))
    await asyncio.gather(sample(slow), sample(slow))
    assert loads == ["fast@1", "slow@1"]


async def test_readers_of_one_adapter_share_the_read_and_a_failed_one_is_repeated():
    held: ResidentAdapters[int] = ResidentAdapters(2, PausableDeadlines(60.0))
    reads: list[int] = []

    async def read() -> int:
        reads.append(len(reads))
        await asyncio.sleep(0.01)
        if len(reads) == 1:
            raise OSError("storage is away")
        return 7

    failed = await asyncio.gather(*(held.read("a", read) for _ in "12"), return_exceptions=True)
    assert [type(one) for one in failed] == [OSError, OSError] and len(reads) == 1
    assert await asyncio.gather(held.read("a", read), held.read("a", read)) == [7, 7]
    held.add("a", 7)
    assert await held.read("a", read) is None and len(reads) == 2
    held.pop("a")
    assert await held.read("a", read) == 7 and len(reads) == 3  # the files may have changed
