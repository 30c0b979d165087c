"""Several base models on the same devices: routes of calls, waits, memory, and stored facts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from placement.memory import ALL, MemoryItem, MemoryPlan
from placement.types import Node
from skyrl_actors.backends.backend import Capabilities, ServedModels
from skyrl_actors.backends.catalogue import CatalogueBackend
from skyrl_actors.backends.demands import part_of, shared_plan
from skyrl_actors.backends.parking_plan import parking_plan, too_much
from skyrl_actors.backends.proved_bases import Facts, ProvedBases
from skyrl_actors.colocation.residency import Residency
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.served_bases import ParkingConfig
from skyrl_actors.messages.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    PartDown,
    StateLost,
)
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.weights import SamplerWeights
from tests.fakes import FakeBackend, changed

FIRST = OpPrecondition(1, None, "r1")


class Parkable(FakeBackend):
    def __init__(self, name: str, log: list[str], runs: bool, broken: bool):
        super().__init__()
        self.name, self.log, self.runs, self.broken = name, log, runs, broken

    async def start(self, epoch: int) -> ServedModels:
        self.log.append(f"start {self.name}")
        if self.broken:
            raise InternalError(f"{self.name} broke")
        return changed(await super().start(epoch), base_model=self.name)

    async def take_over(self, epoch: int) -> Capabilities | None:
        return (
            changed(await super().start(epoch), base_model=self.name).default if self.runs else None
        )

    async def park(self) -> None:
        self.log.append(f"park {self.name}")

    async def resume(self) -> None:
        self.log.append(f"resume {self.name}")

    async def close(self) -> None:
        self.log.append(f"close {self.name}")

    async def status(self) -> dict[str, Any]:
        return {"phase": "TRAIN", "groups": {"policy": {}}, "engines": [{"name": "engine[0]"}]}


class FakeFactory:
    lost = None

    def __init__(self, names: str, running: str = "", max_loaded: int | None = None):
        self.names, self.running, self.max_loaded = names, running, max_loaded
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.built: dict[str, Parkable] = {}
        self.facts: dict[str, Capabilities] = {}

    async def stand_by(self) -> None: ...

    async def reserve(self) -> Residency:
        return Residency(
            dict.fromkeys(self.names, 1),
            1,
            min_residence_s=0.05,
            idle_s=0.0,
            max_loaded=self.max_loaded,
        )

    def build(self, name: str) -> Parkable:
        self.built[name] = Parkable(name, self.log, name in self.running, name in self.broken)
        return self.built[name]

    def known(self, name: str) -> Capabilities | None:
        return self.facts.get(name)

    async def learn(self, able: Capabilities) -> None:
        self.facts[able.base_model] = able

    async def detach(self) -> None:
        self.log.append("detach")

    def release(self) -> None:
        self.log.append("release")


def spec(base: str, name: str = "m") -> ModelSpec:
    return ModelSpec(model_id=f"{name}-{base}", base_model=base, lora=LoraSpec(rank=4))


async def started(factory: FakeFactory) -> tuple[CatalogueBackend, ServedModels]:
    backend = CatalogueBackend(factory, factory.log.append, attempts=2)
    return backend, await backend.start(1)


async def test_each_base_model_is_loaded_once_before_the_first_start_ends():
    factory = FakeFactory("ab")
    backend, bases = await started(factory)
    assert bases.names == ("a", "b")
    moves = [text for text in factory.log if text.split()[0] in ("start", "park", "close")]
    assert moves == ["start a", "park a", "start b", "park b"]
    factory.log.clear()
    await backend.detach()
    again = FakeFactory("ab", running="a")
    again.facts = factory.facts
    backend, bases = await started(again)
    assert bases.names == ("a", "b")
    assert again.log.pop() == "took over base model a"
    assert again.log == [], "what is known is not loaded again"
    await backend.create_model(spec("a"), FIRST)
    assert again.log == ["resume a"] and again.built["a"].models
    await backend.close()
    assert again.log[-1] == "release"


async def test_what_may_not_stay_loaded_goes_to_disk_after_its_proof():
    factory = FakeFactory("abc", max_loaded=1)
    backend, _ = await started(factory)
    ends = [text for text in factory.log if text.startswith("close")]
    assert ends == ["close a", "close b"]
    assert (await backend.status())["base_models"]["b"]["place"] == "disk"


async def test_calls_go_to_their_base_model_and_wait_for_the_devices():
    factory = FakeFactory("ab")
    backend, _ = await started(factory)
    await backend.create_model(spec("a"), FIRST)
    factory.built["a"].go.clear()
    working = asyncio.create_task(
        backend.sample(
            "r1", (1,), SamplingParams(max_tokens=1), SamplerWeights(version="base", base_model="a")
        )
    )
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(backend.create_model(spec("b"), FIRST))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "a still computes"
    said = backend.waiting("b")
    assert said is not None and "base model b waits for the devices" in said and "have a" in said
    assert backend.waiting("a") is None
    late = asyncio.create_task(backend.create_model(spec("a", "late"), FIRST))
    await asyncio.sleep(0.01)
    assert not late.done(), "a leaves, so it admits no more"
    factory.built["a"].go.set()
    await asyncio.wait_for(asyncio.gather(working, waiting, late), 5)
    assert set(factory.built["a"].models) == {"m-a", "late-a"}
    assert set(factory.built["b"].models) == {"m-b"}
    assert await backend.residents() == {"m-a": 1, "late-a": 1, "m-b": 1}
    status = await backend.status()
    assert set(status["groups"]) == {"a policy", "b policy"}
    assert [engine["name"] for engine in status["engines"]] == ["a engine[0]", "b engine[0]"]


async def test_versions_of_a_parked_base_model_are_freed_when_it_is_back():
    factory = FakeFactory("ab")
    backend, _ = await started(factory)
    await backend.create_model(spec("a"), FIRST)
    weights = SamplerWeights(version="m-b@1", base_model="b")
    await backend.drop_sampler(weights)
    assert ("drop_sampler", "m-b@1") not in factory.built["b"].calls
    assert backend.unfreed() == [weights]
    await backend.delete_model(spec("b"))
    assert "resume b" not in factory.log, "nothing to delete, so b is not moved"
    await backend.create_model(spec("b"), FIRST)
    assert ("drop_sampler", "m-b@1") in factory.built["b"].calls
    assert not backend.unfreed()


async def test_a_model_that_restarted_ranks_do_not_hold_is_not_reported_as_deleted():
    """An unload then rebuilds the versions that only its ranks had."""
    factory = FakeFactory("ab")
    backend, _ = await started(factory)
    await backend.create_model(spec("a"), FIRST)
    factory.built["a"].numbers.clear()
    with pytest.raises(StateLost, match="do not hold m-a"):
        await backend.delete_model(spec("a"))
    await backend.create_model(spec("b"), FIRST)
    await backend.delete_model(spec("a"))  # of a parked base model: no rank was asked


async def test_versions_that_an_unloaded_base_model_did_not_free_are_freed_when_it_is_back():
    factory = FakeFactory("ab", max_loaded=1)
    backend, _ = await started(factory)
    await backend.create_model(spec("b"), FIRST)
    weights = SamplerWeights(version="m-b@1", base_model="b")
    factory.built["b"].left.append(weights)  # its ranks restarted when it was dropped
    await backend.create_model(spec("a"), FIRST)
    assert "close b" in factory.log
    assert backend.unfreed() == [weights]
    await backend.create_model(spec("b", "second"), FIRST)
    assert ("drop_sampler", "m-b@1") in factory.built["b"].calls
    assert not backend.unfreed()


async def test_a_base_model_that_cannot_be_loaded_fails_its_own_requests_only():
    factory = FakeFactory("ab", max_loaded=1)
    factory.facts = {name: await _able(name) for name in "ab"}
    backend, _ = await started(factory)
    factory.broken.add("b")
    with pytest.raises(InternalError, match="b broke"):
        await backend.create_model(spec("b"), FIRST)
    assert factory.log.count("start b") == 2 == factory.log.count("close b")
    await backend.create_model(spec("a"), FIRST)
    assert "b broke" in (await backend.status())["base_models"]["b"]["fault"]
    factory.broken.clear()
    await asyncio.wait_for(backend.create_model(spec("b"), FIRST), 10)


async def test_a_base_model_that_does_not_end_cleanly_blocks_no_other_and_comes_back():
    factory = FakeFactory("abc", max_loaded=2)
    backend, _ = await started(factory)

    async def fails() -> None:
        raise TimeoutError("Ray's server does not answer")

    for name in ("b", "c"):
        factory.built[name].close = fails  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        for name in ("a", "b", "c"):
            await backend.create_model(spec(name), FIRST)
    assert "m-c" in await backend.residents()


async def _able(name: str) -> Capabilities:
    return changed(await FakeBackend().start(1), base_model=name).default


async def test_a_stream_has_nothing_until_its_base_model_is_there():
    factory = FakeFactory("ab")
    backend, _ = await started(factory)
    early = await backend.partial("r1", 0, 0.05)
    assert not len(early.tokens)
    growing = asyncio.create_task(backend.partial("r2", 0, 5.0))
    await asyncio.sleep(0)
    asked: list[str] = []

    async def partial(request_id: str, have: int, timeout_s: float) -> Any:
        asked.append(request_id)
        return early

    weights = SamplerWeights(version="base", base_model="b")
    await backend.create_model(spec("b"), FIRST)
    factory.built["b"].partial = partial  # type: ignore[method-assign]
    factory.built["b"].go.clear()
    sampling = asyncio.create_task(
        backend.sample("r2", (1,), SamplingParams(max_tokens=1), weights)
    )
    await asyncio.wait_for(growing, 5)
    assert asked == ["r2"]
    factory.built["b"].go.set()
    await sampling


def plan_of(peak: int, kept: int, host: int, usable: int | None) -> MemoryPlan:
    parts = (
        MemoryItem(who="engine", what="context", bytes=kept, phases=ALL),
        MemoryItem(
            who="engine", what="weights", bytes=peak - kept, phases=frozenset({"TRAIN"}), kept=True
        ),
    )
    return MemoryPlan(parts={"all": parts}, device_bytes=usable, reserve=0.0, host_bytes=host)


def test_the_memory_plan_decides_how_many_are_on_the_devices():
    plans = {"a": plan_of(30, 1, 100, 80), "b": plan_of(40, 1, 100, 80)}
    room = parking_plan(ParkingConfig(), plans)
    assert (dict(room.sizes), room.capacity, room.max_loaded) == ({"a": 29, "b": 39}, 78, None)
    one = parking_plan(ParkingConfig(max_resident=1), plans)
    assert (dict(one.sizes), one.capacity) == (
        {"a": 1, "b": 1},
        1,
    ) and "1 on the devices" in one.text
    assert parking_plan(ParkingConfig(), {"a": plan_of(30, 1, 100, None)}).capacity is None


def test_the_memory_of_hosts_decides_how_many_are_loaded():
    plans = {name: plan_of(40, 2, 90, 80) for name in "abc"}
    assert parking_plan(ParkingConfig(), plans).max_loaded == 2  # 38 bytes each in 90
    assert parking_plan(ParkingConfig(max_loaded=1), plans).max_loaded == 1
    with pytest.raises(ConfigError, match="base model a does not fit beside others"):
        parking_plan(ParkingConfig(), {name: plan_of(200, 2, 90, 80) for name in "ab"})


def test_all_base_models_share_the_slots():
    bases: dict[str, Any] = {
        label: {"base_model": {"type": "tiny", "name": label}} for label in ("one", "two")
    }
    bases["two"]["critic"] = None
    config = ClusterConfig(name="svc", base_models=bases)
    served = config.served()
    made = shared_plan(config, served, [Node(name="n", cpus=4, gpus=0)])
    assert len(made.slots) == 1 and sum(hold[2] for hold in made.slots[0].holds) <= 1.0
    one, two = (part_of(made, served[label].name) for label in ("one", "two"))
    assert {hold[0] for hold in one.slots[0].holds} == {"policy", "critic", "engine"}
    assert {hold[0] for hold in two.slots[0].holds} == {"policy", "engine"}
    assert two.slots_of("policy")[0].index == 0 and two.widths == {"policy": 1, "engine": 1}


def test_facts_are_kept_for_the_same_config_and_libraries(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    known, config = ProvedBases(tmp_path / "journal"), ClusterConfig()
    assert known.facts(config, tmp_path) is None
    able = asyncio.run(_able("tiny"))
    known.store(config, tmp_path, able)
    assert known.facts(config, tmp_path) == Facts(320, 512, True)
    other = config.model_copy(update={"engine": config.engine.model_copy(update={"max_loras": 3})})
    assert known.facts(other, tmp_path) is None
    assert known.facts(config.model_copy(update={"name": "x"}), tmp_path) is not None
    (tmp_path / "config.json").write_text('{"vocab_size": 1}')
    assert known.facts(config, tmp_path) is None
    (tmp_path / "journal" / "proved_bases.json").write_text("{")
    assert known.facts(config, tmp_path) is None, "a damaged file means that nothing is known"


async def test_an_end_that_fails_does_not_stop_the_next_base_model():
    factory = FakeFactory("ab", max_loaded=1)
    factory.facts = {name: await _able(name) for name in "ab"}
    backend, _ = await started(factory)
    await backend.create_model(spec("a"), FIRST)

    async def fails() -> None:
        raise InternalError("the standby process did not end")

    factory.built["a"].close = fails  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        await backend.create_model(spec("b"), FIRST)
        await backend.create_model(spec("a"), FIRST)


async def test_a_base_model_is_unloaded_after_the_snapshots_that_it_writes():
    factory = FakeFactory("ab", max_loaded=1)
    backend, _ = await started(factory)
    await backend.create_model(spec("a"), FIRST)
    copy, release = await backend.copy_state(spec("a"), FIRST), asyncio.Event()

    async def writes(*_: Any) -> None:
        await release.wait()

    factory.built["a"].write_state = writes  # type: ignore[method-assign]
    writing = asyncio.create_task(backend.write_state(spec("a"), copy, "/folder"))
    other = asyncio.create_task(backend.create_model(spec("b"), FIRST))
    await asyncio.sleep(0.2)
    assert not other.done() and not writing.done()
    release.set()
    await asyncio.wait_for(asyncio.gather(writing, other), 5)


async def test_a_call_on_a_state_that_was_unloaded_meanwhile_says_so():
    factory = FakeFactory("ab", max_loaded=1)
    backend, _ = await started(factory)
    await backend.create_model(spec("a"), FIRST)
    await backend.create_model(spec("b"), FIRST)
    with pytest.raises(PartDown, match="was loaded while this call waited"):
        await backend.drop_gradients(spec("a"), FIRST)


async def test_calls_of_one_task_may_hold_a_base_model_together():
    factory = FakeFactory("ab")
    backend, _ = await started(factory)
    async with backend.holding("a"):
        other = asyncio.create_task(backend.create_model(spec("b"), FIRST))
        await asyncio.sleep(0.15)
        async with backend.holding("a"):
            await backend.create_model(spec("a"), FIRST)
        await backend.create_model(spec("a", "second"), FIRST)
        assert not other.done()
    await asyncio.wait_for(other, 5)


async def test_a_base_model_that_is_no_longer_served_is_refused_by_name():
    backend, _ = await started(FakeFactory("ab"))
    gone = SamplerWeights(version="base", base_model="c")
    await backend.drop_sampler(gone)
    with pytest.raises(InvalidRequest, match="base model 'c' is no longer served"):
        await backend.sample("r1", (1,), SamplingParams(max_tokens=1), gone)


async def test_clients_do_not_read_why_a_base_model_cannot_be_loaded():
    factory = FakeFactory("ab", max_loaded=1)
    factory.facts = {name: await _able(name) for name in "ab"}
    factory.broken.add("b")
    backend, _ = await started(factory)
    waiting = asyncio.create_task(backend.create_model(spec("b"), FIRST))
    async with asyncio.timeout(5):
        while (said := backend.waiting("b")) is None or "be loaded" not in said:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "broke" not in said
    with pytest.raises(InternalError):
        await waiting


@pytest.mark.parametrize(
    ("parking", "said"),
    [
        ({}, None),
        ({"max_resident": 1, "max_loaded": 2}, None),
        ({"max_resident": 2}, "parking.max_resident is 2: the 2 largest base models"),
        ({"max_loaded": 3}, "parking.max_loaded is 3, and the memory holds 2"),
    ],
)
def test_limits_that_allow_more_than_there_is_room_for_are_refused(
    parking: dict[str, int], said: str | None
):
    bases = {label: {"base_model": {"type": "tiny", "name": label}} for label in "abc"}
    plans = {name: plan_of(60, 1, 130, 74) for name in bases}

    def config(check: str) -> ClusterConfig:
        placement = {"memory_check": check}
        given = {"base_models": bases, "parking": parking, "placement": placement}
        return ClusterConfig.model_validate(given)

    found = too_much(config("refuse"), plans)
    assert [said in text for text in found] == [True] if said else not found
    assert not too_much(config("off"), plans)


def test_a_limit_is_compared_with_what_the_plan_keeps_loaded():
    bases = {f"b{n}": {"base_model": {"type": "tiny", "name": f"b{n}"}} for n in range(12)}
    plans = {name: plan_of(66, 1, 250, 73) for name in bases}
    given = {"base_models": bases, "parking": {"max_resident": 1}}
    assert not too_much(ClusterConfig.model_validate(given), plans)
