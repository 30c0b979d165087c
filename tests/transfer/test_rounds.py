"""Engines that load the same version at the same time share one delivery."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.rounds import Rounds
from skyrl_actors.transfer.transport import EnginePlace, EngineTarget


def version(number: int) -> WeightManifest:
    return WeightManifest(version=f"m@{number}", kind="full", path=f"/m@{number}", num_bytes=8)


def engine(number: int) -> EngineTarget:
    actor: Any = number
    return EngineTarget(actor, EnginePlace(1))


class Deliveries:
    """Count deliveries, and give each engine a stream with its number as the port."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[Any]]] = []
        self.fails = False

    async def deliver(
        self, manifest: WeightManifest, engines: Sequence[EngineTarget]
    ) -> Sequence[WeightStream | None]:
        numbers: list[Any] = [engine.actor for engine in engines]
        self.made.append((manifest.version, numbers))
        await asyncio.sleep(0)
        if self.fails:
            raise InternalError("the trainer is gone")
        return [WeightStream("", number, 2, "gloo", 1, 1.0) for number in numbers]


async def test_engines_that_ask_at_once_share_a_delivery():
    made = Deliveries()
    rounds = Rounds(made.deliver)
    asked = [rounds.join(version(1), engine(i), lambda: 4, 60.0) for i in range(4)]
    async with asyncio.timeout(5):  # all have joined, so nothing waits for the pause
        found = await asyncio.gather(*asked)
    assert made.made == [("m@1", [0, 1, 2, 3])]
    assert [stream.port for stream in found if stream] == [0, 1, 2, 3]


async def test_a_round_waits_no_longer_than_its_pause():
    made = Deliveries()
    rounds = Rounds(made.deliver)
    await rounds.join(version(1), engine(0), lambda: 2, 0.01)
    await rounds.join(version(1), engine(1), lambda: 2, 0.01)
    assert made.made == [("m@1", [0]), ("m@1", [1])]


async def test_versions_have_rounds_of_their_own():
    made = Deliveries()
    rounds = Rounds(made.deliver)
    asked = [rounds.join(version(i % 2), engine(i), lambda: 2, 60.0) for i in range(4)]
    await asyncio.gather(*asked)
    assert sorted(made.made) == [("m@0", [0, 2]), ("m@1", [1, 3])]


async def test_an_engine_that_can_no_longer_ask_is_not_waited_for():
    made, possible = Deliveries(), [3]
    rounds = Rounds(made.deliver)
    first = asyncio.create_task(rounds.join(version(1), engine(0), lambda: possible[0], 60.0))
    await asyncio.sleep(0.01)
    possible[0] = 2  # one engine died
    async with asyncio.timeout(5):
        await rounds.join(version(1), engine(1), lambda: possible[0], 60.0)
        await first
    assert made.made == [("m@1", [0, 1])]


async def test_a_failed_delivery_fails_for_every_engine_and_the_next_round_is_new():
    made = Deliveries()
    made.fails = True
    rounds = Rounds(made.deliver)
    asked = [rounds.join(version(1), engine(i), lambda: 2, 60.0) for i in range(2)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in found] == ["the trainer is gone"] * 2
    made.fails = False
    assert await rounds.join(version(1), engine(7), lambda: 1, 60.0) is not None
    assert len(made.made) == 2


async def test_a_caller_that_is_cancelled_leaves_the_round_to_the_others():
    made = Deliveries()
    rounds = Rounds(made.deliver)
    first = asyncio.create_task(rounds.join(version(1), engine(0), lambda: 2, 60.0))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    stream = await rounds.join(version(1), engine(1), lambda: 2, 60.0)
    assert stream is not None and stream.port == 1
