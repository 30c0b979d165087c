"""How calls form batches, and what happens to queued calls when a batch fails."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from skyrl_actors.groups.batcher import Batcher, Call
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InternalError, InvalidRequest, StateLost
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.precondition import OpPrecondition


def call(name: str, tokens: int = 4, forward_only: bool = False) -> Call:
    return Call(
        model_id=name,
        precondition=OpPrecondition(1, 0),
        columns=columns_from([Example(np.ones(tokens, np.int32), {})]),
        loss=None,
        forward_only=forward_only,
    )


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


async def asked(batcher: Batcher, *calls: Call) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(batcher.run(c)) for c in calls]
    await asyncio.sleep(0.01)
    return tasks


async def test_calls_that_arrive_during_a_batch_form_the_next_batch():
    ranks = Ranks()
    batcher = Batcher(ranks.compute, 100)
    first = await asked(batcher, call("a"))
    rest = await asked(
        batcher,
        call("b"),
        call("bad"),
        call("c"),
        call("d", 200),
        call("e"),
        call("f", forward_only=True),
    )
    ranks.gate.set()
    results = await asyncio.gather(*first, *rest, return_exceptions=True)
    assert ranks.batches == [["a"], ["b", "bad", "c"], ["d"], ["e"], ["f"]]
    assert [r for r in results if isinstance(r, str)] == ["a", "b", "c", "d", "e", "f"]
    assert isinstance(results[2], InvalidRequest)


async def test_calls_submitted_together_form_one_batch():
    ranks = Ranks()
    ranks.gate.set()
    batcher = Batcher(ranks.compute, 100)
    await asyncio.gather(*(batcher.run(call(name)) for name in "abc"))
    assert ranks.batches == [["a", "b", "c"]]


async def test_with_limit_0_each_call_runs_alone():
    ranks = Ranks()
    ranks.gate.set()
    batcher = Batcher(ranks.compute, 0)
    await asyncio.gather(*(batcher.run(call(name)) for name in "abc"))
    assert ranks.batches == [["a"], ["b"], ["c"]]


async def test_after_a_rank_dies_pending_calls_fail_and_later_calls_run():
    ranks = Ranks()
    batcher = Batcher(ranks.compute, 4)
    tasks = await asked(batcher, call("a"), call("b"))
    ranks.fail = StateLost("the rank died")
    ranks.gate.set()
    for task in tasks:
        with pytest.raises(StateLost):
            await task
    assert ranks.batches == [["a"], ["b"]]
    ranks.fail = None
    assert await batcher.run(call("c")) == "c"


async def test_after_a_batch_fails_each_retry_runs_alone():
    ranks = Ranks()
    ranks.fail = InternalError("a bug")
    ranks.gate.set()
    batcher = Batcher(ranks.compute, 100)
    outcomes = await asyncio.gather(
        *(batcher.run(call(name)) for name in "abc"), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [StateLost] * 3
    outcomes = await asyncio.gather(
        *(batcher.run(call(name)) for name in "abcd"), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [InternalError] * 4
    ranks.fail = None
    await asyncio.gather(*(batcher.run(call(name)) for name in "abc"))
    assert ranks.batches == [["a", "b", "c"], ["a"], ["b"], ["c"], ["d"], ["a", "b", "c"]]


async def test_a_cancelled_call_does_not_stop_the_others():
    ranks = Ranks()
    batcher = Batcher(ranks.compute, 100)
    tasks = await asked(batcher, call("a"), call("b"))
    tasks[0].cancel()
    ranks.gate.set()
    assert await tasks[1] == "b"


async def trained(weights: dict[str, float], sizes: dict[str, int], seconds: int) -> Counter[str]:
    """Return the tokens of tenants that always send the next call when one is answered."""
    tokens = Counter[str]()

    async def compute(calls: Sequence[Call]) -> list:
        await asyncio.sleep(0)
        for one in calls:
            tokens[one.model_id.partition(":")[0]] += one.columns.num_tokens
        return [one.model_id for one in calls]

    batcher = Batcher(compute, 8)

    async def tenant(model_id: str) -> None:
        name = model_id.partition(":")[0]
        while tokens.total() < seconds * 100:
            await batcher.run(replace(call(model_id, sizes[name]), weight=weights[name]))

    models = [f"{name}:train:{n}" for name in sizes for n in range(3)]
    await asyncio.gather(*map(tenant, models))
    return tokens


async def test_tenants_get_equal_tokens_of_passes_not_equal_calls():
    tokens = await trained({"large": 1, "small": 1}, {"large": 32, "small": 2}, 50)
    assert abs(tokens["large"] - tokens["small"]) < 0.05 * tokens.total()


async def test_tenants_get_tokens_of_passes_by_their_weights():
    tokens = await trained({"first": 3, "second": 1}, {"first": 4, "second": 4}, 50)
    assert abs(tokens["first"] / tokens["second"] - 3) < 0.2


async def test_a_call_whose_caller_left_before_its_batch_is_not_computed():
    ranks = Ranks()
    batcher = Batcher(ranks.compute, 4)
    tasks = await asked(batcher, call("a"), call("b"), call("c"))
    tasks[1].cancel()
    await asyncio.sleep(0)
    ranks.gate.set()
    assert await tasks[2] == "c" and ranks.batches == [["a"], ["c"]]
    alone = asyncio.create_task(batcher.run(call("d")))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.sleep(0.01)
    assert await batcher.run(call("e")) == "e" and ranks.batches[-1] == ["e"]
