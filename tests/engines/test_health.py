import asyncio
import itertools
from typing import Any, get_args

import pytest

from skyrl_actors.config.cluster import RestartConfig
from skyrl_actors.engines.health import NEXT, Event, Health, after
from skyrl_actors.engines.interface import EngineStatus
from skyrl_actors.engines.replica import EngineReplica


def test_a_restarted_engine_is_stale_before_it_is_healthy():
    health: Health = "HEALTHY"
    seen = []
    for event in ("died", "again", "started", "ready"):
        health = after(health, event)  # type: ignore[arg-type]
        seen.append(health)
    assert seen == ["DEAD", "STARTING", "STALE", "HEALTHY"]


def test_every_other_step_is_refused():
    for health, event in itertools.product(get_args(Health), get_args(Event)):
        if (health, event) not in NEXT:
            with pytest.raises(ValueError, match=f"a {health} engine cannot be {event}"):
                after(health, event)


def test_only_readiness_makes_an_engine_healthy():
    assert [key for key, result in NEXT.items() if result == "HEALTHY"] == [("STALE", "ready")]


class Silent(EngineReplica):
    """An engine without a process."""

    async def take_over(self) -> bool:
        return False

    async def start(self) -> None:
        self._step("started")
        self._step("ready")

    async def ask(self, method: Any, *arguments: Any, **named: Any) -> Any: ...
    async def status(self) -> EngineStatus:
        return EngineStatus(
            loaded_version="base", adapters=(), asleep=False, rss_bytes=0, running=0
        )

    async def _come_back(self) -> None:
        self._step("again")
        await self.start()

    async def detach(self) -> None:
        await self._stop_restarts()

    async def close(self) -> None:
        await self.detach()


async def test_a_detached_engine_that_dies_is_not_lost_and_not_restarted():
    """When a pool stops, a call that is under way fails with its actor."""
    said: list[str] = []
    engine = Silent("e", RestartConfig(), said.append)
    await engine.start()
    engine.died("killed")
    assert said == ["lost e: killed"]
    await asyncio.wait_for(asyncio.shield(engine._restarting), 60)  # type: ignore[arg-type]
    assert engine.health == "HEALTHY" and engine.restarts == 1
    await engine.detach()
    engine.died("stopped")
    assert said == ["lost e: killed"] and engine.health == "DEAD" and engine.given_up
    engine.restart_if_dead()
    assert engine.given_up
