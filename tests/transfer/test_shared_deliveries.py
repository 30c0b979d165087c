"""A pool whose engines load a version together: one delivery by the trainers, one part for each."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_actors.config.cluster import ClusterConfig, EngineConfig
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.engines.local_engine import DROPPED, LocalEngine
from skyrl_actors.engines.logprob_check import LogprobCheck
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest, WeightStream
from skyrl_actors.transfer.delivery import Delivery
from skyrl_actors.transfer.object_store import ObjectStoreTransfer
from skyrl_actors.transfer.shared_device import SharedDeviceTransfer
from skyrl_actors.transfer.streaming import StreamTransfer
from skyrl_actors.transfer.transport import EnginePlace
from tests.engines.silent import Silent

FOLDER = Path("/weights")
WORKERS = (1, 2, 1, 4)  # of each engine


def manifest(version: str, kind: Any = "full") -> WeightManifest:
    return WeightManifest(version=version, kind=kind, path=f"{FOLDER}/{version}", num_bytes=8)


def weights(version: str) -> SamplerWeights:
    return SamplerWeights(version=version, parts=(manifest(version),))


class Group:
    """Trainers that count what they are asked for."""

    def __init__(self) -> None:
        self.opened: list[list[int]] = []  # the ranks of each gathering
        self.streams: list[WeightStream] = []
        self.read: list[str] = []

    async def open_streams(
        self,
        manifest: WeightManifest,
        streams: Sequence[tuple[int, WeightStream]],
        gathers: bool,
    ) -> list[WeightStream]:
        self.opened.append([rank for rank, _ in streams])
        self.streams += [stream for _, stream in streams]
        return [stream for _, stream in streams]

    def read_files_ref(self, path: str) -> str:
        self.read.append(path)
        return f"content of {path}"


class Engine(Silent):
    """An engine that records the streams of its loads."""

    def __init__(self, number: int):
        super().__init__(f"engine[{number}]", RestartConfig(), print)
        self.place = EnginePlace(WORKERS[number])
        self.got: list[Any] = []
        self.received: list[Any] = []
        self.actor = SimpleNamespace(  # type: ignore[assignment]
            receive=SimpleNamespace(remote=self._receive)
        )

    def _receive(self, path: str, content: Any) -> "asyncio.Future[None]":
        self.received.append(content)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if method.__name__ == "load_full":
            self.got.append(arguments[2][0])


async def pool_with(transfer: Any) -> tuple[EnginePool, Group, Any]:
    group = Group()
    supervisor: Any = SimpleNamespace(group=group, down=None, name="the policy group")
    delivery = Delivery(transfer, supervisor)
    check = LogprobCheck(ClusterConfig().logprob_check, 1e-4, "float32", print)
    pool = EnginePool(EngineConfig(), Path("/base"), delivery.deliver, check)
    engines: Any = [Engine(i) for i in range(len(WORKERS))]
    for engine in engines:
        engine._load = pool.load
        engine.lock = LocalEngine._new_lock(engine, DROPPED)
    pool.engines = list(engines)
    await pool.start()
    pool.memory.have_weights.set()
    return pool, group, engines


async def test_engines_that_wake_up_share_one_stream():
    transfer = StreamTransfer(FOLDER, True, "gloo", 64, 5.0, "lazy")
    pool, group, engines = await pool_with(transfer)
    async with asyncio.timeout(10):
        await pool.preload(weights("m@1"))
    assert [stream.world_size for stream in group.streams] == [1 + sum(WORKERS)]
    assert [engine.got[0].first_rank for engine in engines] == [1, 2, 4, 5]
    assert {engine.lock.state for engine in engines} == {"m@1"}


async def test_samples_of_a_new_version_share_one_stream():
    transfer = StreamTransfer(FOLDER, True, "gloo", 64, 5.0, "lazy")
    pool, group, engines = await pool_with(transfer)
    await pool.preload(weights("m@1"))
    pool.load_times.seconds = [60.0]  # so that engines wait long enough for each other
    pool.versions.register(weights("m@2"))

    async def sample(engine: Any) -> None:
        async with engine.lock.hold("m@2"):
            pass

    async with asyncio.timeout(0.9):
        await asyncio.gather(*map(sample, engines))
    assert [stream.world_size for stream in group.streams] == [9, 9]


@pytest.mark.parametrize(
    ("sharded", "gatherings"), [(True, [[0, 1, 2, 3]]), (False, [[0], [1], [2], [3]])]
)
async def test_engines_beside_ranks_share_one_gathering_of_shards(
    sharded: bool, gatherings: list[list[int]]
):
    transfer = SharedDeviceTransfer(FOLDER, False, 64, 5.0, "lazy", shares=sharded)
    pool, group, engines = await pool_with(transfer)
    for rank, engine in enumerate(engines):
        engine.place = EnginePlace(1, rank)
    async with asyncio.timeout(10):
        await pool.preload(weights("m@1"))
    assert sorted(group.opened) == gatherings
    assert {stream.backend for stream in group.streams} == {"ipc"}
    assert all(len(engine.got) == 1 for engine in engines)


@pytest.mark.parametrize("engines", [1, 4])
async def test_the_object_store_holds_one_copy(engines: int):
    pool, group, living = await pool_with(ObjectStoreTransfer(FOLDER, True))
    pool.engines = pool.engines[:engines]
    await pool.preload(weights("m@1"))
    assert group.read == [f"{FOLDER}/m@1"]
    received: Sequence[Any] = [content for engine in living for content in engine.received]
    assert received == [f"content of {FOLDER}/m@1"] * engines


async def test_an_adapter_is_read_once_for_engines_that_ask_one_after_another():
    pool, group, living = await pool_with(ObjectStoreTransfer(FOLDER, True))
    for engine in living:
        await pool._ensure_delivered(engine, manifest("a@1", "lora"))
    assert group.read == [f"{FOLDER}/a@1"] and all(len(e.received) == 1 for e in living)
