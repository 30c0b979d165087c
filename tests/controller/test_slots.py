"""Fair sharing of sample slots between tenants, and completions by cursor."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.controller.completions import CLONE, Completions
from skyrl_actors.fair_queue import FairQueue, Ticket
from skyrl_actors.fair_slots import FairSlots


async def test_one_flooding_tenant_does_not_starve_another():
    slots, order = FairSlots(2), []

    async def one(tenant: str) -> None:
        async with slots.hold(tenant, 1, 1):
            order.append(tenant)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for tenant in ["flood"] * 100 + ["small"] * 3 + ["other"]:
            group.create_task(one(tenant))
    assert max(i for i, tenant in enumerate(order) if tenant == "small") < 14
    assert order.index("other") < 8 and len(order) == 104


class Scanning(FairQueue):
    """Looks at all tenants for the one with the earliest clock. The reference for the heap."""

    def first(self) -> Ticket | None:
        ready = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not ready:
            return None
        tenant = min(ready, key=lambda tenant: (tenant.clock, tenant.order))
        self._next = [(tenant.clock, tenant.order, tenant.name)]  # for `take`
        return tenant.waiting[0]


async def served(
    requests: list[tuple[str, int, int]],
    limit: int,
    took: int | None = None,
    kind: type[FairQueue] = FairQueue,
) -> list[str]:
    """Return the order in which concurrent requests (tenant, sequences, tokens) run."""
    slots, order = FairSlots(limit), []
    slots._queue = kind()

    async def one(tenant: str, sequences: int, tokens: int) -> None:
        async with slots.hold(tenant, sequences, tokens) as place:
            order.append(tenant)
            await asyncio.sleep(0)
            place.tokens = tokens if took is None else took

    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(one(*request))
    return order


async def test_tenants_get_equal_tokens_not_equal_requests():
    requests = [("large", 16, 16_000)] * 20 + [("small", 1, 100)] * 200
    order = await served(requests, limit=16)
    assert order[:2] == ["large", "small"]
    first_half = order[: order.index("large", 2)]
    assert first_half.count("small") >= 160, "160 small requests have the tokens of a large one"


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5), st.integers(1, 9)), max_size=40),
    st.integers(1, 6),
    st.integers(1, 9),
)
def test_the_earliest_clock_is_always_served_first(
    requests: list[tuple[str, int, int]], limit: int, took: int
):
    expected = asyncio.run(served(requests, limit, took, Scanning))
    assert asyncio.run(served(requests, limit, took)) == expected


async def test_a_newcomer_does_not_wait_for_what_a_burst_may_cost():
    """A burst is charged its maximum while it runs. Who comes then is not charged for it."""
    queue = FairQueue[str]()
    queue.take(queue.add("early", "runs", 10))
    burst = [queue.add("burst", "runs", 1000) for _ in range(100)]
    for _ in burst:
        first = queue.first()
        assert first is not None
        queue.take(first)
    for name in ("early", "burst", "late"):
        for _ in range(50):
            queue.add(name, name, 10)
    served = []
    for _ in range(40):
        first = queue.first()
        assert first is not None
        queue.take(first)
        queue.settle(first, 10)
        served.append(first.item)
    assert abs(served.count("early") - served.count("late")) <= 2 and "burst" not in served


async def test_requests_that_leave_while_others_wait_leave_nothing_behind():
    queue = FairQueue[str]()
    queue.take(queue.add("first", "runs", 1))
    queue.add("second", "waits", 1)
    for number in range(1000):
        queue.withdraw(queue.add(f"t{number % 3}", "leaves", 1))
        queue.settle(_taken(queue, number), 0.0)
    assert len(queue._next) < 100 and len(queue._tenants) <= 5


def _taken(queue: FairQueue, number: int) -> Ticket:
    queue.add(f"u{number}", "runs", 1)
    ticket = queue.first()
    assert ticket is not None
    queue.take(ticket)
    return ticket


async def test_unused_tokens_of_a_sample_are_not_charged():
    requests = [("modest", 1, 32_000)] * 20 + [("other", 1, 100)] * 20
    order = await served(requests, limit=1, took=100)
    assert abs(order[:20].count("modest") - 10) <= 1


async def test_sequences_are_bounded_and_a_larger_request_runs_alone():
    slots = FairSlots(4)
    async with slots.hold("a", 3, 1):
        waiting = asyncio.create_task(slots.hold("b", 2, 1).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    async with asyncio.timeout(1), FairSlots(4).hold("a", 256, 1):
        pass


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["run", "cancel waiting", "cancel at once"])
        ),
        max_size=30,
    )
)
def test_every_place_is_released(events: list[tuple[str, str]]):
    async def scenario() -> None:
        slots, held, most = FairSlots(2), 0, 0

        async def one(tenant: str) -> None:
            nonlocal held, most
            async with slots.hold(tenant, 1, 1):
                held += 1
                most = max(most, held)
                await asyncio.sleep(0.001)
                held -= 1

        tasks = []
        for tenant, what in events:
            task = asyncio.create_task(one(tenant))
            tasks.append(task)
            if what == "cancel at once":
                task.cancel()
        await asyncio.sleep(0)
        waiting = [
            task for task, (_, what) in zip(tasks, events, strict=True) if what == "cancel waiting"
        ]
        for task in waiting[2:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= 2
        async with asyncio.timeout(1), slots.hold("x", 1, 1), slots.hold("y", 1, 1):
            pass

    asyncio.run(scenario())


async def test_completions_are_read_by_cursor_and_wake_waiting_callers():
    done = Completions()
    done.begin(epoch=1)
    done.note("s", 0, "r0", failed=False)
    done.note("s", CLONE + 3, "clone", failed=True)
    done.note("s", None, "unnumbered", failed=False)
    found, cursor = await done.after("s", 0, 0, 0)
    assert [one.request_id for one in found] == ["r0"]
    assert (await done.after("s", 1, 0, 0))[0][0].failed
    waiting = asyncio.create_task(done.after("s", 0, cursor, 5))
    await asyncio.sleep(0)
    done.note("s", 1, "r1", failed=False)
    found, later = await waiting
    assert [one.request_id for one in found] == ["r1"] and later > cursor
    assert await done.after("s", 0, later, 0.01) == ([], later)
    again = Completions()
    again.begin(epoch=2)
    again.note("s", 1, "r1", failed=False)
    assert (await again.after("s", 0, later, 0))[0], (
        "a cursor of an earlier controller hides nothing of a later one"
    )


async def test_forgetting_a_stream_wakes_waiting_callers():
    done = Completions()
    waiting = asyncio.create_task(done.after("s", 0, 0, 0.05))
    await asyncio.sleep(0)
    done.forget("s")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.01)
    assert await waiting == ([], 0)


async def test_a_tenant_that_cancels_its_requests_gets_no_more_than_its_share():
    slots, held = FairSlots(1), dict.fromkeys("ab", 0.0)

    async def one(name: str) -> None:
        async with slots.hold(name, 1, 100) as place:
            loop = asyncio.get_running_loop()
            began, running = loop.time(), asyncio.current_task()
            assert running is not None
            if name == "a":
                loop.call_later(0.009, running.cancel)
            try:
                await asyncio.sleep(0.01)
                place.tokens = 100
            finally:
                held[name] += loop.time() - began

    async def tenant(name: str) -> None:
        while sum(held.values()) < 0.5:
            await asyncio.gather(asyncio.create_task(one(name)), return_exceptions=True)

    await asyncio.gather(*(tenant(name) for name in "aaaabbbb"))
    assert held["b"] > 0.4 * (held["a"] + held["b"])


async def test_a_request_that_is_cancelled_while_it_waits_costs_its_tenant_nothing():
    slots = FairSlots(1)

    async def held(name: str) -> None:
        async with slots.hold(name, 1, 1000):
            await asyncio.sleep(60)

    runs, waits, stays = (asyncio.create_task(held(name)) for name in "bac")
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert "a" not in slots._queue._tenants or slots._queue._tenants["a"].paid == 0
    for task in (runs, stays):
        task.cancel()
    await asyncio.gather(runs, stays, return_exceptions=True)
