"""The last failures, and totals of the last 24 hours, in memory."""

import asyncio
from collections import deque
from collections.abc import Callable

from skyrl_actors.controller.operations import Op
from skyrl_actors.messages.operating import FailedRequest, HistoryPoint
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.results import Failure
from skyrl_actors.observe.counts import COUNTS

KEPT_FAILURES = 200
LONGEST_MESSAGE = 500
EVERY_S = 60.0
POINTS = 24 * 60


class Recent:
    """What operators see of the recent past of one controller."""

    def __init__(self, wall: Callable[[], float]):
        self._wall = wall
        self._failures: deque[FailedRequest] = deque(maxlen=KEPT_FAILURES)
        self._points: deque[HistoryPoint] = deque(maxlen=POINTS)
        self._failed = 0

    def note_failure(self, op: Op, failure: Failure) -> None:
        """Keep a request that failed."""
        self._failed += 1
        self._failures.append(
            FailedRequest(
                at=self._wall(),
                request_id=op.request_id,
                kind=op.kind or "unread",
                target=op.model_id or op.stream,
                owner=owner_of(op.request_id) or owner_of(op.session_id or ""),
                category=failure.category,
                message=failure.message.partition("\n")[0][:LONGEST_MESSAGE],
            )
        )

    def failures(self, owner: str | None, most: int) -> list[FailedRequest]:
        """Return the newest failures of an owner, or of all for None; the newest is first."""
        mine = [one for one in self._failures if owner in (None, one.owner)]
        return mine[: -most - 1 : -1]

    def history(self) -> list[HistoryPoint]:
        """Return the totals of each minute of the last 24 hours, oldest first."""
        return list(self._points)

    async def follow(self, num_open: Callable[[], int]) -> None:
        """Keep the totals of each minute, in an endless loop."""
        while True:
            self.keep(num_open())
            await asyncio.sleep(EVERY_S)

    def keep(self, num_open: int) -> None:
        """Keep the totals of now."""
        totals = dict.fromkeys(("trained_tokens", "sampled_tokens"), 0.0)
        for (metric, _), value in COUNTS.read().items():
            if metric in totals:
                totals[metric] += value
        self._points.append(
            HistoryPoint(at=self._wall(), failed=self._failed, open_requests=num_open, **totals)
        )
