import asyncio
import itertools
from typing import Any, get_args

import pytest

from skyrl_actors.config.restart import RestartConfig
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.supervision import backoff
from skyrl_actors.supervision.health import NEXT, Event, Health, after
from skyrl_actors.supervision.supervisor import Supervisor


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
            with pytest.raises(ValueError, match=f"a {health} part cannot be {event}"):
                after(health, event)


def test_only_readiness_makes_an_engine_healthy():
    assert [key for key, result in NEXT.items() if result == "HEALTHY"] == [("STALE", "ready")]


class Part(Supervisor):
    """A part without a process. Its next `failures` restarts fail."""

    failures = 0

    async def take_over(self, actors: Any) -> bool:
        return False

    async def start(self) -> None:
        self._step("started")
        self._step("ready")

    async def _come_back(self) -> None:
        self._step("again")
        if self.failures:
            self.failures -= 1
            raise InternalError("no memory")
        await self.start()

    async def log_tail(self) -> str:
        return "the last line"

    async def close(self) -> None:
        await self.detach()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "BACKOFF_S", 0.0)
    monkeypatch.setattr(backoff, "COOLDOWN_S", 1.0)


async def test_a_detached_part_that_dies_is_not_lost_and_not_restarted():
    """When a pool stops, a call that is under way fails with its actor."""
    said: list[str] = []
    part = Part("e", RestartConfig(), said.append)
    await part.start()
    part.died("killed")
    assert said == ["lost e: killed"] and part.down == "killed"
    await asyncio.wait_for(part.until_healthy(), 60)
    await part.wait_until_settled()
    assert part.down is None and part.restarts == 1
    await part.detach()
    part.died("stopped")
    assert said == ["lost e: killed"] and part.health == "DEAD" and part.given_up
    part.restart_if_dead()
    assert part.given_up


async def test_a_part_is_retried_with_pauses_and_waiters_get_it_when_it_runs():
    said: list[str] = []
    part = Part("e", RestartConfig(max_in_a_row=5), said.append)
    part.failures = 3
    part.start_later()
    await asyncio.wait_for(asyncio.gather(part.until_healthy(), part.until_healthy()), 60)
    assert said == ["e did not start: no memory"] * 3 and not part.given_up
    await part.close()


async def test_a_part_that_keeps_dying_is_given_up_with_its_log_tail():
    said: list[str] = []
    part = Part("e", RestartConfig(max_in_a_row=2), said.append)
    part.failures = 10
    await part.start()
    part.died("killed")
    waiters = [asyncio.ensure_future(part.until_healthy()) for _ in range(2)]
    await asyncio.wait(waiters, timeout=60)
    for waiter in waiters:
        with pytest.raises(InternalError, match="given up: no memory\nthe last line"):
            await waiter
    assert part.given_up and part.failures == 8
    assert said[-1] == "e is given up: no memory\nthe last line"


async def test_a_part_that_is_given_up_gets_a_new_row_of_restarts_after_its_cooldown():
    part = Part("e", RestartConfig(max_in_a_row=1), lambda _: None)
    part.failures = 1
    await part.start()
    part.died("killed")
    with pytest.raises(InternalError, match="given up"):
        await part.until_healthy()
    with pytest.raises(InternalError, match="given up"):
        await part.until_healthy()
    await asyncio.sleep(1.1)
    await asyncio.wait_for(part.until_healthy(), 60)
    assert part.restarts == 1


async def test_a_part_that_dies_before_its_restart_has_ended_is_restarted_again():
    """Nobody asks for the part, so nobody else would notice."""

    class Fragile(Part):
        async def _come_back(self) -> None:
            await super()._come_back()
            if self.restarts == 0:
                self.died("killed again")

    told = list[int]()
    part = Fragile("e", RestartConfig(max_in_a_row=5), lambda _: None)
    part.on_restarted = lambda: told.append(part.restarts)
    await part.start()
    part.died("killed")
    await asyncio.wait_for(part.wait_until_settled(), 60)
    assert part.health == "HEALTHY" and part.restarts == 2 and told == [2]


async def test_an_unexpected_error_of_a_restart_is_told_and_tried_again():
    """Such as Ray's NodeDiedError while a base model is brought to a node."""

    class Surprised(Part):
        async def _come_back(self) -> None:
            self._step("again")
            if self.failures:
                self.failures -= 1
                raise OSError("the node is gone")
            await self.start()

    said: list[str] = []
    part = Surprised("e", RestartConfig(max_in_a_row=5), said.append)
    part.failures = 2
    await part.start()
    part.died("killed")
    await asyncio.wait_for(part.until_healthy(), 60)
    assert said == ["lost e: killed"] + ["e did not start: OSError('the node is gone')"] * 2
    await part.close()
