"""Engines whose memory moves fail, in a pool without processes."""

import asyncio
from typing import Any

import pytest

from skyrl_actors.backends.offload import Offloader
from skyrl_actors.colocation.healing import MoveHealing
from skyrl_actors.colocation.phase_lock import ColocatedPhaseLock
from skyrl_actors.colocation.phases import Phase
from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.engines.local_engine import LocalEngine
from skyrl_actors.messages.errors import InternalError
from tests.colocation.test_healing import until
from tests.engines.silent import Silent
from tests.engines.test_pool import pool_of


class Moving(Silent):
    """Track what is on the device, as vLLM does, and fail halfway on demand."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.lock = LocalEngine._new_lock(self, "base")  # type: ignore[arg-type]
        self.on_device = {"weights", "kv_cache"}
        self.failing: dict[str, int] = {}  # how often each call fails
        self.torn = False

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        assert not self.torn
        what = " ".join((method.__name__, *(str(a) for a in arguments)))
        if self.failing.get(what):
            self.failing[what] -= 1
            self.torn = True
            raise InternalError("CUDA out of memory")
        match method.__name__:
            case "sleep":
                self.on_device.clear()
            case "release_kv":
                self.on_device.discard("kv_cache")
            case _:
                self.on_device.add(arguments[0])
        return 1

    async def _come_back(self) -> None:
        """Start where memory is free, and join in a phase with engines awake."""
        self.torn, self.on_device = False, {"weights", "kv_cache"}
        self._step("again")
        self._step("started")
        assert self.joining is not None
        async with self.joining():
            self._step("ready")


@pytest.mark.parametrize(
    "what", ["sleep 1", "release_kv False", "release_kv True", "wake weights", "wake kv_cache"]
)
async def test_an_engine_whose_move_fails_restarts_and_the_others_go_on(what: str):
    pool = pool_of(0)
    good, bad = engines = [Moving(f"engine[{i}]", RestartConfig(), print) for i in range(2)]
    pool.engines = [*engines]
    phase_lock = ColocatedPhaseLock(
        Offloader("cpu", [], pool),
        Phase.SAMPLE,
        60,
        MoveHealing(first_pause_s=0.01, longest_pause_s=0.02),
    )
    pool.join_with(lambda: phase_lock.hold(Phase.SAMPLE))
    await pool.start()
    bad.failing[what] = 2

    async def pass_through(phase: Phase, resident: set[str]) -> None:
        async with phase_lock.hold(phase):
            assert pool.memory.have_weights.is_set() == ("weights" in resident)
            for engine in pool.living_own():
                assert isinstance(engine, Moving) and engine.on_device == resident

    for _ in range(4):
        for phase, resident in (
            (Phase.TRAIN, set[str]()),
            (Phase.SYNC, {"weights"}),
            (Phase.SAMPLE, {"weights", "kv_cache"}),
            (Phase.SYNC, {"weights"}),
            (Phase.SAMPLE, {"weights", "kv_cache"}),
        ):
            await asyncio.wait_for(pass_through(phase, resident), 20)
        await until(lambda: bad.health == "HEALTHY")
    assert (good.restarts, bad.restarts) == (0, 2) and bad._limit.in_a_row <= 1
    assert [f["total"] for f in phase_lock.failures.values()] == [2] and phase_lock.fault() is None
    assert "CUDA out of memory" in str(bad.reason)


async def test_engines_left_halfway_by_an_earlier_controller_restart():
    pool = pool_of(0)
    good, bad = engines = [Moving(f"engine[{i}]", RestartConfig(), print) for i in range(2)]
    pool.engines = [*engines]
    offloader = Offloader("cpu", [], pool)
    phase_lock = ColocatedPhaseLock(
        offloader, Phase.TRAIN, 60, MoveHealing(first_pause_s=0.01, longest_pause_s=0.02)
    )
    pool.join_with(lambda: phase_lock.hold(Phase.SAMPLE))
    await pool.start()
    bad.failing["sleep 1"] = 1
    async with phase_lock.hold(Phase.TRAIN):
        await offloader.as_taken_over(Phase.TRAIN)
        assert not good.on_device and bad.health == "DEAD"
        await asyncio.sleep(0.05)
        assert bad.health != "HEALTHY"  # it joins only in a phase with engines awake
    await until(lambda: bad.health == "HEALTHY")
    async with phase_lock.hold(Phase.SAMPLE):
        assert good.on_device == bad.on_device == {"weights", "kv_cache"}
