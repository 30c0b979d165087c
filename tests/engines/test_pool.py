"""Which engines a pool builds and which one it chooses; without processes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.types import Node
from skyrl_actors import remote
from skyrl_actors.backends.demands import plan_for
from skyrl_actors.config.cluster import (
    ClusterConfig,
    EngineConfig,
    GroupConfig,
    LoraConfig,
    PlacementConfig,
    RestartConfig,
)
from skyrl_actors.config.transfers import StreamTransferConfig
from skyrl_actors.engines.build import build_pool, end_others
from skyrl_actors.engines.check_prompt import fixed_prompt
from skyrl_actors.engines.engine_site import ActorSite
from skyrl_actors.engines.interface import EngineStatus
from skyrl_actors.engines.local_engine import LocalEngine
from skyrl_actors.engines.logprob_check import LogprobCheck
from skyrl_actors.engines.pool import EnginePool
from skyrl_actors.engines.vllm_samples import vllm_params
from skyrl_actors.messages.errors import StateLost
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput, Sequence
from skyrl_actors.messages.weights import SamplerWeights
from tests.engines.silent import Silent


async def nobody(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("tensor", "pipeline", "gpus", "over_nodes"),
    [(2, 1, 4, False), (2, 2, 8, False), (4, 2, 4, True), (1, 1, 4, False)],
)
def test_an_engine_with_several_gpus_gets_their_ids_or_bundles(
    tensor: int, pipeline: int, gpus: int, over_nodes: bool, tmp_path: Path
):
    """On one node, one actor has the GPU ids; over several, vLLM places workers in bundles."""
    config = ClusterConfig(
        policy=GroupConfig(num_ranks=2),
        critic=None,
        transfer=StreamTransferConfig(type="nccl"),
        placement=PlacementConfig(device="gpu", layout="split"),
        engine=EngineConfig(num_engines=1, tensor_parallel=tensor, pipeline_parallel=pipeline),
        lora=LoraConfig(max_full_models=1),
    )
    plan = plan_for(config, [Node(name=f"n{i}", cpus=64, gpus=gpus, labels={}) for i in range(4)])
    (tmp_path / "config.json").write_text("{}")
    reserved: Any = None
    devices = {slot.index: f"gpu-of-{slot.index}" for slot in plan.slots}
    ranks: Any = None
    pool = build_pool(config, tmp_path, plan, reserved, devices, {}, nobody, ranks, 1, False, print)
    (engine,) = pool.engines
    assert isinstance(engine, LocalEngine) and isinstance(engine.site, ActorSite)
    spec, site, slots = engine.site.spec, engine.site, plan.actors_of("engine")[0]
    assert (
        spec.topology.tensor_parallel,
        spec.topology.pipeline_parallel,
        engine.place.num_workers,
    ) == (
        tensor,
        pipeline,
        tensor * pipeline,
    )
    assert (spec.over_nodes, site.over_nodes) == (over_nodes, over_nodes) and site.bundle == slots[
        0
    ].index
    assert len({slot.node for slot in slots}) == (2 if over_nodes else 1)
    ids = () if over_nodes else tuple(devices[slot.index] for slot in slots)
    assert spec.device_ids == ids and site.on_gpu == (len(slots) == 1)
    bundles = site.environment.get("VLLM_RAY_BUNDLE_INDICES")
    assert bundles == (",".join(str(slot.index) for slot in slots) if over_nodes else None)


def pool_of(count: int) -> EnginePool:
    pool = EnginePool(
        EngineConfig(),
        Path("/base"),
        nobody,
        LogprobCheck(ClusterConfig().logprob_check, 1e-4, "float32", print),
    )
    pool.engines = [Answering(f"engine[{i}]", RestartConfig(), print) for i in range(count)]
    return pool


class Answering(Silent):
    """Record the samples it gets, and answer on demand."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.given: list[str] = []
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.lock = LocalEngine._new_lock(self, "base")  # type: ignore[arg-type]

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        self.given.append(arguments[0])
        self.asked.set()
        await self.go.wait()


class Sampling(Answering):
    """Answer with as many sequences as vLLM would."""

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        params: SamplingParams = arguments[2]
        asked = vllm_params(params)
        self.given.append(f"{asked.n}")
        tokens, logprobs = np.asarray([5, 6], np.int32), np.asarray([-1.0, -2.0], np.float32)
        return SampleOutput(
            sequences=(Sequence(tokens=tokens, logprobs=logprobs, stop_reason="stop"),) * asked.n,
            version="base",
        )


@pytest.mark.parametrize(("temperature", "asked"), [(0.0, "1"), (0.5, "4")])
async def test_several_greedy_samples_run_once_and_are_repeated_in_the_answer(
    temperature: float, asked: str
):
    pool = pool_of(0)
    engine = Sampling("engine[0]", RestartConfig(), print)
    pool.engines = [engine]
    await pool.start()
    output = await pool.sample(
        "r",
        (1, 2),
        SamplingParams(max_tokens=3, num_samples=4, temperature=temperature),
        SamplerWeights(version="base"),
    )
    assert [one.tokens.tolist() for one in output.sequences] == [[5, 6]] * 4
    assert engine.given == [asked]


class Reporting(Sampling):
    """An engine of this service that reports its check prompt."""

    async def status(self) -> EngineStatus:
        return replace(await super().status(), check_prompt=(1, 2, 3))


async def test_the_check_prompt_comes_from_an_engine_that_runs(tmp_path: Path):
    pool = pool_of(0)
    pool.logprob_check.vocab_size = 300
    engine = Reporting("engine[0]", RestartConfig(), print)
    pool.engines = [engine]
    await pool.learn_check_prompt()
    assert pool.logprob_check.prompt == ()  # it still starts
    await pool.start()
    await pool.learn_check_prompt()
    assert pool.logprob_check.prompt == (1, 2, 3) and engine.given == []


async def test_engines_by_url_are_asked_to_continue_the_opening():
    pool = pool_of(0)
    pool.logprob_check.vocab_size = 300
    engine = Sampling("external[0]", RestartConfig(), print)
    engine.managed = False
    pool.engines = [engine]
    await pool.start()
    for _ in range(2):
        await pool.learn_check_prompt()
    wanted = (*fixed_prompt(300, pool.config.max_model_len), 5, 6)
    assert pool.logprob_check.prompt == wanted and engine.given == ["1"]


async def test_a_draining_engine_finishes_its_samples_and_gets_no_more():
    pool = pool_of(2)
    first, second = pool.engines
    assert isinstance(first, Answering) and isinstance(second, Answering)
    await pool.start()
    base, params = SamplerWeights(version="base"), SamplingParams(max_tokens=1)
    running = [asyncio.create_task(pool.sample(f"r{i}", (i,), params, base)) for i in range(8)]
    await asyncio.gather(first.asked.wait(), second.asked.wait())
    assert first.given and second.given
    draining, had = asyncio.create_task(first.drain(30)), list(first.given)
    await asyncio.sleep(0)
    assert first.health == "DRAINING" and not draining.done()
    later = [asyncio.create_task(pool.sample(f"s{i}", (i,), params, base)) for i in range(8)]
    second.asked.clear()
    await second.asked.wait()
    first.go.set()
    await draining
    second.go.set()
    await asyncio.gather(*running, *later)
    assert first.given == had and len(second.given) == 16 - len(had)
    hangs = asyncio.create_task(pool.sample("last", (1,), params, base))
    second.go.clear()
    await asyncio.sleep(0)
    await second.drain(0.01)  # its deadline
    with pytest.raises(StateLost, match="no engine runs now"):
        await pool.sample("none", (1,), params, base)
    second.go.set()
    await hangs


async def test_a_stale_engine_gets_no_samples():
    pool = pool_of(2)
    await pool.start()
    stale, other = pool.engines
    assert isinstance(stale, Answering) and isinstance(other, Answering)
    other.go.set()
    for event in ("died", "again", "started"):
        stale._step(event)  # type: ignore[arg-type]
    assert stale.health == "STALE"
    for i in range(8):
        await pool.sample(
            f"r{i}", (i,), SamplingParams(max_tokens=1), SamplerWeights(version="base")
        )
    assert not stale.given and len(other.given) == 8


async def test_an_engine_counts_its_samples_until_they_end_however_they_end():
    pool = pool_of(1)
    engine = pool.engines[0]
    assert isinstance(engine, Answering)
    await pool.start()
    base, params = SamplerWeights(version="base"), SamplingParams(max_tokens=1)
    running = [asyncio.create_task(pool.sample(f"r{i}", (i,), params, base)) for i in range(3)]
    await engine.asked.wait()
    await asyncio.sleep(0)
    assert engine.num_samples == 3
    running[0].cancel()
    await asyncio.wait(running[:1])
    assert engine.num_samples == 2
    engine.go.set()
    await asyncio.gather(*running[1:])
    assert engine.num_samples == 0
    engine.ask = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        await pool.sample("fails", (1,), params, base)
    assert engine.num_samples == 0


async def test_a_dead_engine_is_restarted_by_a_sample_for_another():
    pool = pool_of(2)
    await pool.start()
    dead = pool.engines[0]
    began: list[str] = []
    dead.restart_if_dead = lambda: began.append(dead.name)  # type: ignore[method-assign]
    weights, params = SamplerWeights(version="base"), SamplingParams(max_tokens=1)
    await pool.any_healthy(weights, params)
    assert not began
    dead.health = "DEAD"
    await pool.any_healthy(weights, params)
    assert began == [dead.name]


async def test_only_engines_that_the_config_no_longer_has_are_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """A base model can be called `engine`: then the names of all its parts contain that word."""
    ended: list[str] = []

    async def end_named(names: list[str]) -> None:
        ended.extend(names)

    monkeypatch.setattr(remote, "end_named", end_named)
    ranks = ("s:engine:policy:0", "s:engine:standby:0")
    actors: Any = dict.fromkeys((*ranks, "s:engine:engine:0", "s:engine:engine:1"))
    await end_others(pool_of(0), actors, "s:engine:engine:")
    assert ended == ["s:engine:engine:0", "s:engine:engine:1"]
