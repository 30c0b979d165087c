"""Read sequence numbers from before a restart when their stream is first used again.

A start does not read them, so its duration does not depend on the number of earlier requests.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from skyrl_actors.controller.completions import Completions
from skyrl_actors.controller.queue import KEPT_PER_STREAM, RequestQueue
from skyrl_actors.journal.protocol import Journal

STREAMS = 20_000  # streams known to be read; a stream beyond that is read again
ENDED = 10  # of them, those of ended models and samplers whose requests stay in memory


class Recall:
    """Fill the queue and the completions with a stream's requests from before a restart."""

    def __init__(self, journal: Journal, queue: RequestQueue, completions: Completions):
        self._journal = journal
        self._queue = queue
        self._completions = completions
        self._before = 1
        self._reading: OrderedDict[str, asyncio.Task[None]] = OrderedDict()
        self._is_live: Callable[[str], bool] = lambda stream: True
        self._ended: OrderedDict[str, None] = OrderedDict()

    def begin(self, next_number: int, is_live: Callable[[str], bool]) -> None:
        """Set the first number of this controller; lower numbers are from earlier ones.

        What ends a live stream makes the tables forget it.
        """
        self._before, self._is_live = next_number, is_live

    async def stream(self, stream: str) -> None:
        """Read a stream's requests from before the restart, unless done. Raises Unavailable."""
        if self._before == 1:
            return
        reading = self._reading.get(stream)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception())):
            reading = self._reading[stream] = asyncio.get_running_loop().create_task(
                self._read(stream)
            )
            while len(self._reading) > STREAMS:
                self._reading.popitem(last=False)
        if not reading.done():
            await asyncio.shield(reading)

    async def _read(self, stream: str) -> None:
        found = await self._journal.newest_answered(stream, self._before, KEPT_PER_STREAM)
        if found:
            if not self._is_live(stream):
                self._note_ended(stream)
            self._queue.recall(
                stream,
                [(op.seq_id, op.digest, op.request_id) for op in found if op.seq_id is not None],
            )
            samples = [(op.seq_id, op.request_id, op.failed) for op in found if op.kind == "Sample"]
            self._completions.recall(
                stream, [(seq_id, name, bad) for seq_id, name, bad in samples if seq_id is not None]
            )

    def _note_ended(self, stream: str) -> None:
        """Keep an ended stream for those that wait for it, and forget the oldest such stream."""
        self._ended[stream] = None
        while len(self._ended) > ENDED:
            oldest, _ = self._ended.popitem(last=False)
            self._reading.pop(oldest, None)
            if not self._is_live(oldest):
                self._queue.forget(oldest)
                self._completions.forget(oldest)
