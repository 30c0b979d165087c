"""Payloads in memory are bounded in bytes, and every request runs."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.controller.payloads import PayloadMemory
from skyrl_actors.messages.requests import Request, Unload

SOME: Request = Unload("m")


@dataclass
class Op:
    request_id: str
    request: Request | None
    num_bytes: int
    base_model: str = ""


async def test_a_journaled_payload_leaves_memory_when_there_is_no_space():
    memory = PayloadMemory(100, small=0)
    first, second = Op("a", SOME, 80), Op("b", SOME, 30)
    memory.keep(first)
    memory.keep(second)
    assert first.request is SOME and second.request is None and memory.num_bytes == 80


async def test_a_starting_request_evicts_payloads_of_waiting_ones():
    memory = PayloadMemory(100, small=0)
    waiting, starting = Op("a", SOME, 80), Op("b", None, 90)
    memory.keep(waiting)
    await asyncio.wait_for(memory.start(starting), 1)
    assert waiting.request is None and memory.num_bytes == 90


async def test_requests_wait_for_memory_in_order_and_a_large_one_runs_alone():
    memory = PayloadMemory(100, small=0)
    await memory.start(Op("a", None, 60))
    large, small = (
        asyncio.create_task(memory.start(Op(name, None, size)))
        for name, size in (("b", 300), ("c", 10))
    )
    await asyncio.sleep(0)
    assert not large.done() and not small.done(), "first come, first served"
    memory.end("a")
    await asyncio.wait_for(large, 1)
    assert memory.num_bytes == 300 and not small.done()
    memory.end("b")
    await asyncio.wait_for(small, 1)


async def test_payloads_of_a_base_model_that_waits_leave_room_for_those_of_others():
    memory = PayloadMemory(100, small=0, shares=2)
    await memory.start(Op("a", None, 40, "one"))
    waiting = asyncio.create_task(memory.start(Op("b", None, 40, "one")))
    await asyncio.sleep(0)
    await asyncio.wait_for(memory.start(Op("c", None, 40, "two")), 1)
    await asyncio.wait_for(memory.start(Op("d", None, 300, "three")), 1)
    memory.end("c")
    await asyncio.sleep(0)
    assert not waiting.done() and memory.num_bytes == 340
    memory.end("a")
    await asyncio.wait_for(waiting, 1)
    for name in ("b", "d"):
        memory.end(name)
    assert memory.num_bytes == 0


async def test_a_kept_payload_beyond_the_share_of_its_base_model_leaves_memory():
    memory = PayloadMemory(100, small=0, shares=2)
    first, second = Op("a", SOME, 50, "one"), Op("b", SOME, 50, "one")
    for op in (first, second):
        memory.keep(op)
    await memory.start(first)
    waiting = asyncio.create_task(memory.start(second))
    await asyncio.sleep(0)
    assert second.request is None and memory.num_bytes == 50 and not waiting.done()
    await asyncio.wait_for(memory.start(Op("c", None, 50, "two")), 1)
    memory.end("a")
    await asyncio.wait_for(waiting, 1)
    assert memory.num_bytes == 100


EVENTS = st.lists(
    st.tuples(st.integers(1, 150), st.sampled_from(["run", "cancel", "drain"])), max_size=25
)


@given(EVENTS)
def test_memory_is_bounded_and_every_request_runs(events: list[tuple[int, str]]):
    async def scenario() -> None:
        memory, running, most = PayloadMemory(100, small=0), 0, 0

        async def run(op: Op, what: str) -> None:
            nonlocal running, most
            memory.keep(op)
            await asyncio.sleep(0)
            try:
                if what != "drain":
                    await memory.start(op)
                    running += op.num_bytes
                    most = max(most, running if running > op.num_bytes else 0)
                    try:
                        await asyncio.sleep(0)
                    finally:
                        running -= op.num_bytes
            finally:
                memory.end(op.request_id)

        tasks = [
            asyncio.create_task(run(Op(str(i), SOME, size), what))
            for i, (size, what) in enumerate(events)
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for (_, what), task in zip(events, tasks, strict=True):
            if what == "cancel" and not task.done():
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert most <= 100
        assert memory.num_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_cancelled_wait_releases_its_memory(size: int):
    memory = PayloadMemory(100, small=0)
    await memory.start(Op("a", None, 100))
    waiting = asyncio.create_task(memory.start(Op("b", None, size)))
    await asyncio.sleep(0)
    memory.end("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    memory.end("b")
    assert memory.num_bytes == 0


async def test_small_requests_overtake_requests_that_wait_for_memory():
    memory = PayloadMemory(100, small=10)
    await memory.start(Op("create", None, 60))  # waits for memory that an unload frees
    large = asyncio.create_task(memory.start(Op("large", None, 300)))
    await asyncio.sleep(0)
    unload = Op("unload", SOME, 10)
    memory.keep(unload)
    await asyncio.wait_for(memory.start(unload), 1)
    assert unload.request is SOME and not large.done()
    memory.end("unload")
    memory.end("create")
    await asyncio.wait_for(large, 1)
