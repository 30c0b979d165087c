"""Growing samples, for clients that stream them: tokens after a position, once there are any."""

import asyncio
from contextlib import suppress

from skyrl_actors.messages.results import PartialSample


class Partials:
    """The tokens so far of each streamed sample, and the readers that wait for more."""

    def __init__(self) -> None:
        self._growing: dict[str, PartialSample] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def grow(self, request_id: str, so_far: PartialSample) -> None:
        self._growing[request_id] = so_far
        self._wake(request_id)

    def end(self, request_id: str) -> None:
        self._growing.pop(request_id, None)
        self._wake(request_id)

    def _wake(self, request_id: str) -> None:
        for changed in self._waiting.get(request_id, ()):
            changed.set()

    async def after(self, request_id: str, have: int, timeout_s: float) -> PartialSample:
        """Return what came after the first `have` tokens.

        The result is empty if nothing came within `timeout_s`, or if the sample has ended.
        """
        so_far = self._growing.get(request_id, PartialSample())
        if len(so_far.tokens) <= have:
            changed, waiting = asyncio.Event(), self._waiting.setdefault(request_id, set())
            waiting.add(changed)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await changed.wait()
            finally:
                waiting.discard(changed)
                if not waiting and self._waiting.get(request_id) is waiting:
                    del self._waiting[request_id]
            so_far = self._growing.get(request_id, PartialSample())
        return PartialSample(so_far.tokens[have:], so_far.logprobs[have:])
