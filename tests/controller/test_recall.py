"""Requests from before a restart, of streams that are not open any more."""

import asyncio
from typing import Any

from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.controller.bounds import queue_of
from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.recall import ENDED, Recall
from skyrl_actors.journal.entries import Operation

SAMPLES = 20


class Answered:
    """A journal in which every stream has answered samples."""

    async def newest_answered(self, stream: str, before: int, limit: int) -> list[Operation]:
        return [
            Operation(
                number=n,
                request_id=f"{stream}-{n}",
                kind="Sample",
                stream=stream,
                seq_id=n,
                digest=n,
                model_id=None,
                session_id=None,
                accepted_at=0.0,
            )
            for n in range(1, SAMPLES + 1)
        ]


def recall() -> tuple[Recall, RequestQueue, Completions]:
    queue, completions = queue_of(LimitsConfig()), Completions()
    journal: Any = Answered()
    return Recall(journal, queue, completions), queue, completions


def known(queue: RequestQueue, streams: list[str]) -> list[str]:
    return [one for one in streams if queue.known(one, SAMPLES, SAMPLES) is not None]


async def test_few_ended_streams_stay_in_memory():
    found, queue, completions = recall()
    found.begin(1000, lambda stream: stream == "open")
    await found.stream("open")
    ended = [f"ended{number}" for number in range(3 * ENDED)]
    for stream in ended:
        await found.stream(stream)
        assert known(queue, [stream])  # a retry gets the id of its first request
    assert known(queue, ended) == ended[-ENDED:]
    assert known(queue, ["open"]) == ["open"]
    done, _ = await asyncio.wait_for(completions.after("open", 0, 0, 1.0), 5)
    assert len(done) == SAMPLES


async def test_a_forgotten_stream_is_read_again():
    found, queue, _ = recall()
    found.begin(1000, lambda stream: False)
    for stream in ("first", *(f"other{number}" for number in range(ENDED)), "first"):
        await found.stream(stream)
    assert known(queue, ["first"]) == ["first"]
