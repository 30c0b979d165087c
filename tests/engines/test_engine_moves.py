"""Engines whose memory does not move as it should, in a pool without processes."""

import asyncio
from typing import Any

import pytest

from skyrl_actors.backends.moves import Mover
from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.colocation.keeper import PhaseKeeper
from skyrl_actors.colocation.phases import Phase
from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.engines.engine import Engine
from skyrl_actors.messages.errors import InternalError
from tests.colocation.test_healing import until
from tests.engines.test_health import Silent
from tests.engines.test_pool import pool_of


class Moving(Silent):
    """Knows what it has on its device, as vLLM does, and breaks off half-way when it is told to."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.gate = Engine._new_gate(self, "base")  # type: ignore[arg-type]
        self.on_device = {"weights", "kv_cache"}
        self.failing: dict[str, int] = {}  # by what is asked, how often
        self.torn = False

    async def ask(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        assert not self.torn
        what = " ".join((method, *(str(a) for a in arguments)))
        if self.failing.get(what):
            self.failing[what] -= 1
            self.torn = True
            raise InternalError("CUDA out of memory")
        match method:
            case "sleep":
                self.on_device.clear()
            case "release_kv":
                self.on_device.discard("kv_cache")
            case _:
                self.on_device.add(arguments[0])
        return 1

    async def _come_back(self) -> None:
        """As an engine's actor does: it is made where there is room, and joins where engines are awake."""
        self.torn, self.on_device = False, {"weights", "kv_cache"}
        self._step("again")
        self._step("started")
        assert self.joining is not None
        async with self.joining():
            self._step("ready")


@pytest.mark.parametrize("what", ["sleep 1", "release_kv False", "release_kv True", "wake weights", "wake kv_cache"])
async def test_an_engine_that_can_not_move_is_made_anew_and_the_others_go_on(what: str):
    pool = pool_of(0)
    good, bad = engines = [Moving(f"engine[{i}]", RestartConfig(), print) for i in range(2)]
    pool.engines = [*engines]
    keeper = PhaseKeeper(Mover("cpu", [], pool), Phase.SAMPLE, 60, MoveHealing(0.01, 0.02))
    pool.join_with(lambda: keeper.hold(Phase.SAMPLE))
    await pool.start()
    bad.failing[what] = 2

    async def pass_through(phase: Phase, resident: set[str]) -> None:
        async with keeper.hold(phase):
            assert pool.memory.have_weights.is_set() == ("weights" in resident)
            for engine in pool.living_own():
                assert isinstance(engine, Moving) and engine.on_device == resident

    for _ in range(4):
        for phase, resident in (
            (Phase.TRAIN, set[str]()), (Phase.SYNC, {"weights"}), (Phase.SAMPLE, {"weights", "kv_cache"}), (Phase.SYNC, {"weights"}),
            (Phase.SAMPLE, {"weights", "kv_cache"}),
        ):  # fmt: skip
            await asyncio.wait_for(pass_through(phase, resident), 20)
        await until(lambda: bad.health == "HEALTHY")
    assert (good.restarts, bad.restarts) == (0, 2) and bad._limit.in_a_row <= 1
    assert [f["total"] for f in keeper.failures.values()] == [2] and keeper.fault() is None
    assert "CUDA out of memory" in str(bad.reason)


async def test_engines_that_an_earlier_controller_left_half_way_are_made_anew():
    pool = pool_of(0)
    good, bad = engines = [Moving(f"engine[{i}]", RestartConfig(), print) for i in range(2)]
    pool.engines = [*engines]
    mover = Mover("cpu", [], pool)
    keeper = PhaseKeeper(mover, Phase.TRAIN, 60, MoveHealing(0.01, 0.02))
    pool.join_with(lambda: keeper.hold(Phase.SAMPLE))
    await pool.start()
    bad.failing["sleep 1"] = 1
    async with keeper.hold(Phase.TRAIN):
        await mover.as_taken_over()
        assert not good.on_device and bad.health == "DEAD"
        await asyncio.sleep(0.05)
        assert bad.health != "HEALTHY"  # it needs the phase in which engines are awake
    await until(lambda: bad.health == "HEALTHY")
    async with keeper.hold(Phase.SAMPLE):
        assert good.on_device == bad.on_device == {"weights", "kv_cache"}
