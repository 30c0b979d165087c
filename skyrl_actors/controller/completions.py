"""Which samples of a sampler were answered, as a numbered list: one poll tells a client of all of them."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from skyrl_actors.controller.queue import REMEMBERED
from skyrl_actors.messages.results import Completion

CLONE = 1_000_000_000  # a copy of a client numbers its samples from a multiple of this
EPOCH_BITS = 32


class Completions:
    """Numbers grow over restarts, so that a cursor of an earlier controller is behind all that this one knows."""

    def __init__(self) -> None:
        self._next = 1
        self._done: dict[str, deque[Completion]] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def begin(self, epoch: int) -> None:
        self._next = (epoch << EPOCH_BITS) + 1

    def note(self, stream: str, seq_id: int | None, request_id: str, failed: bool) -> None:
        if seq_id is None:  # nobody can ask for it by its sampler
            return
        done = self._done.setdefault(stream, deque(maxlen=REMEMBERED))
        done.append(Completion(self._next, request_id, failed, seq_id // CLONE))
        self._next += 1
        if stream in self._changed:
            self._changed.pop(stream).set()

    def recall(self, stream: str, older: Sequence[tuple[int, str, bool]]) -> None:
        """(seq_id, request id, failed) from before a restart. Called before anybody asks for this stream."""
        since = list(self._done.pop(stream, ()))
        known = {one.request_id for one in since}
        for seq_id, request_id, failed in older:
            if request_id not in known:
                self.note(stream, seq_id, request_id, failed)
        for one in since:
            self._done.setdefault(stream, deque(maxlen=REMEMBERED)).append(replace(one, number=self._next))
            self._next += 1

    async def after(self, stream: str, clone: int, cursor: int, timeout_s: float) -> tuple[list[Completion], int]:
        """Those of this copy of the client behind `cursor`, and the next cursor. Waits for one up to `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            found = [one for one in self._done.get(stream, ()) if one.number > cursor and one.clone == clone]
            left_s = deadline - asyncio.get_running_loop().time()
            if found or left_s <= 0:
                return found, found[-1].number if found else cursor
            changed = self._changed.setdefault(stream, asyncio.Event())
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def forget(self, stream: str) -> None:
        self._done.pop(stream, None)
        if stream in self._changed:
            self._changed.pop(stream).set()
