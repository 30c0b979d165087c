"""Calls that were meant for a dead engine never reach the process that is started in its place."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_actors import remote
from skyrl_actors.config.cluster import ClusterConfig, EngineConfig, RestartConfig
from skyrl_actors.engines import local_engine
from skyrl_actors.engines.interface import EngineProcess
from skyrl_actors.engines.local_engine import LocalEngine
from skyrl_actors.engines.logprob_check import LogprobCheck
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.messages.errors import PartDown, StateLost
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest
from skyrl_actors.transfer.transport import EnginePlace
from tests.engines.silent import Silent

PARAMS = SamplingParams(max_tokens=1)


class Process:
    """A simulated engine process, which is its own RPC connection. Its samples hang."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_dead = asyncio.Event()

    async def call(self, name: str) -> None:
        self.calls.append(name)
        if name == "sample":
            await self.is_dead.wait()
            raise StateLost("the process died")

    def hang_up(self) -> None:
        self.is_dead.set()

    async def close(self) -> None: ...


class Simulated(LocalEngine):
    """A local engine whose processes are simulated. `may_start` lets one start."""

    processes: list[Process]
    may_start: asyncio.Event

    async def _make(self) -> None:
        process = Process()
        self.actor = self._rpc = process  # type: ignore[assignment]
        self.processes.append(process)
        await self.may_start.wait()

    async def _call_rpc(self, actor: Any, rpc: Any, name: str, *_: Any, **named: Any) -> None:
        await rpc.call(name)


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> EnginePool:
    async def ended(names: Any) -> None: ...

    monkeypatch.setattr(remote, "end_named", ended)
    monkeypatch.setattr(local_engine, "OVER_RPC", ("sample", "load_full"))
    monkeypatch.setattr("skyrl_actors.supervision.backoff.BACKOFF_S", 0.01)

    async def deliver(*_: Any) -> None: ...

    config = ClusterConfig().logprob_check
    check = LogprobCheck(config, 1e-4, "float32", print)
    pool = EnginePool(EngineConfig(), Path("/base"), deliver, check)

    async def available() -> None: ...

    site: Any = SimpleNamespace(
        spec=SimpleNamespace(name="engine[0]", device="cpu"),
        actor_names=(),
        available=available,
        failed=print,
    )
    engine = Simulated(site, EngineConfig(), RestartConfig(), 1, pool.load, print, EnginePlace(1))
    engine.processes, engine.may_start = [], asyncio.Event()
    engine.may_start.set()
    pool.engines = [engine, Silent("engine[1]", RestartConfig(), print)]
    pool.engines[1].health = "STALE"  # never chosen
    pool.join_with(nullcontext)
    return pool


def weights(kind: Any) -> SamplerWeights:
    part = WeightManifest(version="v1", kind=kind, path="/none/v1", num_bytes=1)
    return SamplerWeights(version="v1", parts=(part,), base_model="")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["lora", "full"])
async def test_a_sample_that_waited_for_a_dead_engine_does_not_reach_its_successor(
    pool: EnginePool, kind: str
):
    """The weights are delivered to the dead process when the next one starts."""
    engine = pool.engines[0]
    assert isinstance(engine, Simulated)
    delivering, delivered = asyncio.Event(), asyncio.Event()

    async def deliver(*_: Any) -> None:
        delivering.set()
        await delivered.wait()

    pool._deliver = deliver
    await engine.start()
    (first,) = engine.processes
    sample = asyncio.create_task(pool.sample("r", (1,), PARAMS, weights(kind)))
    await delivering.wait()
    engine.may_start.clear()
    engine.lost(engine.actor, "its host is gone")  # type: ignore[arg-type]
    await until(lambda: len(engine.processes) == 2)
    assert engine.health == "STARTING" and first.is_dead.is_set()
    delivered.set()
    with pytest.raises(PartDown):
        await sample
    engine.may_start.set()
    await until(lambda: engine.health == "HEALTHY")
    assert engine.processes[1].calls == (["load_full"] if kind == "full" else [])
    await engine.detach()


async def test_an_engine_that_starts_is_asked_nothing(pool: EnginePool):
    engine = pool.engines[0]
    assert isinstance(engine, Simulated)
    engine.may_start.clear()
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.processes)
    with pytest.raises(PartDown, match="is STARTING"):
        await engine.ask(EngineProcess.load_full, "v", (), ())
    engine.may_start.set()
    await starting
    assert engine.health == "HEALTHY" and not engine.processes[0].calls


class Connection:
    """An RPC connection to an engine whose calls last `seconds`."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    async def call(self, *_: Any, **named: Any) -> str:
        await asyncio.sleep(self._seconds)
        return "answered"


class WithStatus(LocalEngine):
    """A local engine whose process tells its status while `answers`."""

    answers = True

    async def _status_of(self, actor: Any) -> Any:
        if not self.answers:
            raise StateLost("status: no answer")


@pytest.fixture
def slow_engine() -> WithStatus:
    site: Any = SimpleNamespace(spec=SimpleNamespace(name="engine[0]", device="cpu"))
    restart = RestartConfig(call_timeout_s=0.2)
    loader: Any = None
    return WithStatus(site, EngineConfig(), restart, 1, loader, print, EnginePlace(1))


async def called(engine: LocalEngine, name: str, seconds: float) -> Any:
    rpc: Any = Connection(seconds)
    actor: Any = None
    return await engine._call_rpc(actor, rpc, name)


async def test_a_sample_that_is_late_does_not_end_an_engine_that_answers(slow_engine: WithStatus):
    """The engine refuses the sample itself, at the same time or a little later."""
    assert await called(slow_engine, "sample", 0.3) == "answered"
    with pytest.raises(remote.Overdue, match=r"partial: no answer within 0.2 s"):
        await called(slow_engine, "partial", 0.3)


async def test_an_engine_that_does_not_answer_is_lost(slow_engine: WithStatus):
    with pytest.raises(remote.Overdue, match=r"sample: no answer within 0.2 s"):
        await called(slow_engine, "sample", 30)
    slow_engine.answers = False
    with pytest.raises(StateLost, match="status: no answer"):
        await called(slow_engine, "sample", 0.3)
