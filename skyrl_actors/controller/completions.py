"""Numbered lists of the answered samples of each sampler.

One poll returns a client all samples that were answered since the last one.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from skyrl_actors.controller.queue import KEPT_PER_STREAM
from skyrl_actors.messages.results import Completion

CLONE = 1_000_000_000  # the n-th copy of a client numbers its samples from n times this
EPOCH_BITS = 32


class Completions:
    """Answered samples by sampler, with the newest `KEPT_PER_STREAM` of each.

    Numbers start at the epoch, so a cursor of an earlier controller precedes all present numbers.
    """

    def __init__(self) -> None:
        self._next = 1
        self._done: dict[str, deque[Completion]] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def begin(self, epoch: int) -> None:
        """Start the numbers of this controller's epoch."""
        self._next = (epoch << EPOCH_BITS) + 1

    def note(self, stream: str, seq_id: int | None, request_id: str, failed: bool) -> None:
        """Append an answered sample, and wake callers that wait for it."""
        if seq_id is None:  # the SDK polls only for numbered samples
            return
        done = self._done.setdefault(stream, deque(maxlen=KEPT_PER_STREAM))
        done.append(
            Completion(
                number=self._next, request_id=request_id, failed=failed, clone=seq_id // CLONE
            )
        )
        self._next += 1
        if stream in self._changed:
            self._changed.pop(stream).set()

    def recall(self, stream: str, older: Sequence[tuple[int, str, bool]]) -> None:
        """Add samples from before a restart, as (seq_id, request id, failed).

        Called before the first poll of the stream.
        """
        since = list(self._done.pop(stream, ()))
        known = {one.request_id for one in since}
        for seq_id, request_id, failed in older:
            if request_id not in known:
                self.note(stream, seq_id, request_id, failed)
        for one in since:
            self._done.setdefault(stream, deque(maxlen=KEPT_PER_STREAM)).append(
                replace(one, number=self._next)
            )
            self._next += 1

    async def after(
        self, stream: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Completion], int]:
        """Return the samples of a client copy after `cursor`, and the next cursor.

        Waits for one up to `timeout_s`.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            found = [
                one
                for one in self._done.get(stream, ())
                if one.number > cursor and one.clone == clone
            ]
            left_s = deadline - asyncio.get_running_loop().time()
            if found or left_s <= 0:
                return found, found[-1].number if found else cursor
            changed = self._changed.setdefault(stream, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()

    def forget(self, stream: str) -> None:
        """Remove the list of a sampler, and wake callers that wait for it."""
        self._done.pop(stream, None)
        if stream in self._changed:
            self._changed.pop(stream).set()
