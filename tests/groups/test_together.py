"""Which calls go together, and what becomes of those that wait."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from skyrl_actors.groups.together import Call, Together
from skyrl_actors.messages.columns import Example, columns_from
from skyrl_actors.messages.errors import InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.turn import Turn


def call(name: str, tokens: int = 4, forward_only: bool = False) -> Call:
    return Call(name, Turn(1, 0), columns_from([Example(np.ones(tokens, np.int32), {})]), None, forward_only)


class Ranks:
    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.fail: Exception | None = None

    async def compute(self, calls: Sequence[Call]) -> list:
        self.batches.append([c.model_id for c in calls])
        await self.gate.wait()
        if self.fail:
            raise self.fail
        return [InvalidRequest(c.model_id) if c.model_id == "bad" else c.model_id for c in calls]


async def asked(together: Together, *calls: Call) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(together.run(c)) for c in calls]
    await asyncio.sleep(0.01)
    return tasks


async def test_those_that_come_while_one_is_computed_go_together():
    ranks = Ranks()
    together = Together(ranks.compute, 100)
    first = await asked(together, call("a"))
    rest = await asked(together, call("b"), call("bad"), call("c"), call("d", 200), call("e"), call("f", forward_only=True))
    ranks.gate.set()
    results = await asyncio.gather(*first, *rest, return_exceptions=True)
    assert ranks.batches == [["a"], ["b", "bad", "c"], ["d"], ["e"], ["f"]]
    assert [r for r in results if isinstance(r, str)] == ["a", "b", "c", "d", "e", "f"]
    assert isinstance(results[2], InvalidRequest)


async def test_those_of_one_moment_go_together_at_once():
    ranks = Ranks()
    ranks.gate.set()
    together = Together(ranks.compute, 100)
    await asyncio.gather(*(together.run(call(name)) for name in "abc"))
    assert ranks.batches == [["a", "b", "c"]]


async def test_none_go_together_when_none_shall():
    ranks = Ranks()
    ranks.gate.set()
    together = Together(ranks.compute, 0)
    await asyncio.gather(*(together.run(call(name)) for name in "abc"))
    assert ranks.batches == [["a"], ["b"], ["c"]]


async def test_a_death_befalls_those_on_their_way_and_the_next_are_asked_again():
    ranks = Ranks()
    together = Together(ranks.compute, 4)
    tasks = await asked(together, call("a"), call("b"))
    ranks.fail = StateLost("the rank died")
    ranks.gate.set()
    for task in tasks:
        with pytest.raises(StateLost):
            await task
    assert ranks.batches == [["a"], ["b"]]
    ranks.fail = None
    assert await together.run(call("c")) == "c"


async def test_when_several_break_off_each_is_asked_again_and_goes_alone():
    ranks = Ranks()
    ranks.fail = InternalError("a bug")
    ranks.gate.set()
    together = Together(ranks.compute, 100)
    outcomes = await asyncio.gather(*(together.run(call(name)) for name in "abc"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StateLost] * 3
    outcomes = await asyncio.gather(*(together.run(call(name)) for name in "abcd"), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [InternalError] * 4
    ranks.fail = None
    await asyncio.gather(*(together.run(call(name)) for name in "abc"))
    assert ranks.batches == [["a", "b", "c"], ["a"], ["b"], ["c"], ["d"], ["a", "b", "c"]]


async def test_one_that_nobody_waits_for_any_more_does_not_stop_the_others():
    ranks = Ranks()
    together = Together(ranks.compute, 100)
    tasks = await asked(together, call("a"), call("b"))
    tasks[0].cancel()
    ranks.gate.set()
    assert await tasks[1] == "b"
