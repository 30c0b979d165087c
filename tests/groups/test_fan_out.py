"""Calls to many ranks through relays: order, subsets, errors and late ranks."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from skyrl_actors import remote
from skyrl_actors.groups import fan_out
from skyrl_actors.groups.fan_out import Branches, FanOut, RankCall, RelayActor, tree_to
from skyrl_actors.messages.errors import InvalidRequest, StateLost
from skyrl_actors.workers.interface import RowOutput

RANKS = 70  # with four branches: 18 relays of ranks, 5 relays of relays, 2 of these


class Rank:
    """A rank in this process. `answers` computes a call's result; None: it never answers."""

    def __init__(self, number: int, answers: Callable[[int, Any], Any]):
        self.number, self._answers = number, answers
        self.seen: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        return _Method(lambda *args: self._call(method, args))

    def _call(self, method: str, args: tuple[Any, ...]) -> "asyncio.Future[Any]":
        self.seen.append((method, *args))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        found = self._answers(self.number, args)
        if isinstance(found, BaseException):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        return future


class Relay:
    """A relay in this process. `pauses` are seconds before each of its next calls begins."""

    def __init__(self, branches: Branches):
        self._actor = RelayActor(branches)
        self.calls = 0
        self.fails = False
        self.pauses: list[float] = []

    async def _run(self, number: int, part: RankCall) -> list[Any]:
        if self.pauses:
            await asyncio.sleep(self.pauses.pop(0))
        return await self._actor.relay(number, part)

    @property
    def relay(self) -> Any:
        def call(number: int, part: RankCall) -> "asyncio.Future[Any]":
            self.calls += 1
            if not self.fails:
                return asyncio.ensure_future(self._run(number, part))
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(remote.ActorDied("the actor died: killed"))
            return future

        return _Method(call)


class _Method:
    def __init__(self, remote_call: Callable[..., Any]):
        self.remote = remote_call


@pytest.fixture(autouse=True)
def four_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "BRANCHES", 4)


def group(answers: Callable[[int, Any], Any]) -> tuple[FanOut, list[Any], list[Any]]:
    """Return a way to simulated ranks, the ranks, and the relays."""
    ranks: list[Any] = [Rank(number, answers) for number in range(RANKS)]
    make: Any = lambda branches, rank: Relay(branches)  # noqa: E731
    branches, relays = tree_to(ranks, make)
    return FanOut([f"policy[{i}]" for i in range(RANKS)], branches, relays), ranks, relays


def call_of(method: str = "verb", **options: Any) -> RankCall:
    return RankCall(**{"method": method, "ranks": range(RANKS), "timeout_s": 0.2, **options})


async def ask(way: FanOut, **options: Any) -> list[Any]:
    return await way.results(way.submit(call_of(**options)), "verb")


async def test_each_rank_gets_the_common_and_its_own_arguments():
    way, _, relays = group(lambda number, args: (number, args))
    found = await ask(way, common=("epoch",), own=[(10 * i,) for i in range(RANKS)])
    assert found == [(i, ("epoch", 10 * i)) for i in range(RANKS)]
    assert [relay.calls for relay in relays] == [1] * (18 + 5 + 2)


async def test_a_call_to_one_rank_uses_one_relay_a_level_and_keeps_the_order():
    way, ranks, relays = group(lambda number, args: (number, args))
    one = way.submit(call_of("open", ranks=[40]))
    every = way.submit(call_of("feed"))
    assert await way.results(one, "open") == [(40, ())]
    await way.results(every, "feed")
    assert sum(relay.calls for relay in relays) == 25 + 3
    assert ranks[40].seen == [("open",), ("feed",)]


async def test_calls_that_ray_starts_in_another_order_reach_ranks_in_theirs():
    way, ranks, relays = group(lambda number, args: number + 1)
    for relay in relays:
        relay.pauses = [0.03, 0.0, 0.02]
    names = [f"verb {i}" for i in range(4)]
    submitted = [way.submit(call_of(name, timeout_s=10.0)) for name in names]
    await asyncio.gather(*(way.results(one, "verb") for one in submitted))
    assert all(rank.seen == [(name,) for name in names] for rank in ranks)


async def test_a_lost_call_of_a_relay_restarts_the_group():
    way, _, relays = group(lambda number, args: number + 1)
    relays[0].pauses = [60.0]
    lost = asyncio.ensure_future(ask(way))
    await asyncio.sleep(0)
    with pytest.raises(remote.ActorDied, match="a relay lost call 0"):
        await ask(way)
    lost.cancel()


async def test_errors_of_ranks_become_one():
    errors = {3: StateLost("torn"), 66: StateLost("torn")}
    way, _, _ = group(lambda number, args: errors.get(number, number + 1))
    with pytest.raises(StateLost, match=r"verb on policy\[3\], policy\[66\]: torn"):
        await ask(way)
    way, _, _ = group(lambda number, args: InvalidRequest("bad rows"))
    with pytest.raises(InvalidRequest, match="bad rows"):
        await ask(way)


async def test_late_ranks_are_named():
    way, _, _ = group(lambda number, args: None if number in (5, 69) else number + 1)
    with pytest.raises(remote.Overdue, match=r"policy\[5\], policy\[69") as caught:
        await ask(way)
    assert caught.value.missing == ("policy[5]", "policy[69]")


async def test_the_ranks_of_a_dead_relay_are_named():
    way, _, relays = group(lambda number, args: number + 1)
    relays[17].fails = True  # of the ranks 68 and 69
    with pytest.raises(remote.ActorDied, match=r"verb on policy\[68\], policy\[69\]: the actor d"):
        await ask(way)


def output_of(rank: int) -> RowOutput:
    numbers = np.full(2, rank, np.float32)
    sums = {"loss:sum": 1.0, f"of_{rank}:sum": 2.0}
    return RowOutput(
        rows=(2 * rank,), field="v", values=numbers, elementwise=-numbers, sums=sums, compute_s=rank
    )


async def test_relays_merge_the_outputs_of_their_ranks():
    way, _, _ = group(lambda number, args: [output_of(number)])
    found = await ask(way, merges=True)
    merged = [outputs[0] for outputs in found if outputs is not None]
    assert len(merged) == 2  # one for each relay that was called
    assert [row for output in merged for row in output.rows] == [2 * i for i in range(RANKS)]
    values = np.concatenate([output.values for output in merged])
    np.testing.assert_array_equal(values, np.repeat(np.arange(RANKS), 2))
    assert sum(output.sums["loss:sum"] for output in merged) == RANKS
    assert merged[1].sums["of_69:sum"] == 2.0 and merged[1].compute_s == 69


@pytest.mark.parametrize("in_part", [False, True])
async def test_an_error_keeps_its_rank_when_outputs_are_merged(in_part: bool):
    def answers(number: int, args: Any) -> Any:
        if number != 30:
            return [output_of(number)]
        return [StateLost("torn")] if in_part else StateLost("torn")

    way, _, _ = group(answers)
    if not in_part:
        with pytest.raises(StateLost, match=r"verb on policy\[30\]: torn"):
            await ask(way, merges=True)
        return
    found = await ask(way, merges=True)
    assert isinstance(found[30][0], StateLost)
    rows = [row for part in found if part is not None for row in getattr(part[0], "rows", ())]
    assert sorted(rows) == [2 * i for i in range(RANKS) if i != 30]


async def test_few_ranks_are_called_directly():
    ranks: list[Any] = [Rank(number, lambda number, args: number + 1) for number in range(4)]
    branches, relays = tree_to(ranks, lambda branches, rank: pytest.fail("a relay was started"))
    way = FanOut([f"policy[{i}]" for i in range(4)], branches)
    assert await ask(way, ranks=[1, 3], own=[(7,), (8,)]) == [2, 4] and not relays
    assert [rank.seen for rank in ranks] == [[], [("verb", 7)], [], [("verb", 8)]]
