"""The deadline of a sample counts only while its engine is awake."""

import asyncio
import time

import pytest

from skyrl_actors.engines.deadlines import PausableDeadlines
from skyrl_actors.engines.vllm_stats import LastStats
from skyrl_actors.messages.errors import InternalError, StateLost


async def test_a_block_ends_at_its_deadline():
    deadlines = PausableDeadlines(0.05)
    with pytest.raises(TimeoutError):
        async with deadlines.within():
            await asyncio.sleep(5)


async def test_a_pause_does_not_count():
    deadlines = PausableDeadlines(0.2)
    async with deadlines.within():
        deadlines.pause()
        deadlines.pause()  # a second pause changes nothing
        await asyncio.sleep(0.4)
        deadlines.resume()


async def test_after_a_pause_the_rest_of_the_time_is_left():
    deadlines, loop = PausableDeadlines(1.0), asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with deadlines.within():
            await asyncio.sleep(0.6)
            deadlines.pause()
            await asyncio.sleep(0.1)
            deadlines.resume()
            resumed = loop.time()
            await asyncio.sleep(5)
    assert loop.time() - resumed < 0.9


async def test_a_block_that_ended_has_no_deadline():
    deadlines = PausableDeadlines(5.0)
    async with deadlines.within():
        pass
    deadlines.pause()
    deadlines.resume()


async def test_a_pause_in_the_moment_of_a_deadline_does_not_fail():
    deadlines, loop = PausableDeadlines(0.05), asyncio.get_running_loop()
    paused = loop.create_future()

    def pause() -> None:
        try:
            deadlines.pause()
            deadlines.resume()
            paused.set_result(None)
        except RuntimeError as error:
            paused.set_exception(error)

    with pytest.raises(TimeoutError):
        async with deadlines.within():
            loop.call_later(0.06, pause)
            time.sleep(0.1)  # noqa: ASYNC251  both are due in the next pass of the loop
            await asyncio.sleep(5)
    await paused


async def late(deadlines: PausableDeadlines, steps: int) -> None:
    async with deadlines.of_sample("r1", "engine[0]"):
        deadlines.steps += steps
        await asyncio.sleep(5)


async def test_a_late_sample_fails_alone_while_its_engine_computes():
    with pytest.raises(
        InternalError, match=r"r1 did not finish within 0 s on engine\[0\]"
    ) as found:
        await late(PausableDeadlines(0.02), steps=1)
    assert not isinstance(found.value, StateLost)


async def test_an_engine_that_computed_nothing_until_the_deadline_is_lost():
    with pytest.raises(StateLost, match="computed nothing meanwhile"):
        await late(PausableDeadlines(0.02), steps=0)


async def test_vllm_counts_its_steps():
    deadlines = PausableDeadlines(1.0)
    LastStats(deadlines).record(None, None)
    assert deadlines.steps == 1
