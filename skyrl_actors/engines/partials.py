"""Samples while they grow, for who reads along: what there is behind a position, as soon as there is something."""

import asyncio
from contextlib import suppress

from skyrl_actors.messages.results import PartialSample


class Partials:
    def __init__(self) -> None:
        self._growing: dict[str, PartialSample] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def grow(self, request_id: str, so_far: PartialSample) -> None:
        self._growing[request_id] = so_far
        if request_id in self._changed:
            self._changed.pop(request_id).set()

    def end(self, request_id: str) -> None:
        self._growing.pop(request_id, None)
        if request_id in self._changed:
            self._changed.pop(request_id).set()

    async def after(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """What came behind the first `have` tokens; empty when nothing did in time, or the sample has ended."""
        so_far = self._growing.get(request_id, PartialSample())
        if len(so_far.tokens) <= have:
            changed = self._changed.setdefault(request_id, asyncio.Event())
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), timeout_s)
            if not changed.is_set():
                self._changed.pop(request_id, None)  # it may have ended before anybody asked
            so_far = self._growing.get(request_id, PartialSample())
        return PartialSample(so_far.tokens[have:], so_far.logprobs[have:])
