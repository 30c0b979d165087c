"""Downloads by signed links: few of each run's owner at a time, as fast as their clients read.

Such a link needs no API key, so the limits of keys do not apply.
"""

import asyncio
import logging
from collections.abc import Callable

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from skyrl_actors.api.open_requests import OpenRequests
from skyrl_actors.api.paced import STALLED_S
from skyrl_actors.messages.errors import CapacityError
from skyrl_actors.messages.paths import TinkerPath, owner_of

log = logging.getLogger(__name__)
WITHOUT_OWNER = "-"


class Download(Response):
    """Another response, of which each part must be read within `STALLED_S`.

    It counts as open from its creation to its end. Raises CapacityError if too many are open.
    """

    def __init__(self, path: TinkerPath, counts: OpenRequests):
        super().__init__()
        self._path = path
        self._counts = counts
        self._owner = owner_of(path.model_id) or WITHOUT_OWNER
        self._inner: Response | None = None
        self._close: Callable[[], None] = lambda: None
        if not counts.enter(self._owner):
            raise CapacityError(
                f"{counts.limit} downloads of these checkpoints are open; "
                "try again when one has ended"
            )

    def of(self, inner: Response, close: Callable[[], None] = lambda: None) -> "Download":
        """Set what is sent. `close` is called at the end."""
        self._inner, self._close = inner, close
        return self

    def give_up(self) -> None:
        """Count it no longer, because it is not sent."""
        self._counts.leave(self._owner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        assert self._inner is not None
        try:
            await self._inner(scope, receive, sent)
        except (TimeoutError, ClientDisconnect):  # the latter is made of the former
            log.warning(
                "a download of %s was cut off: its client is gone, or read nothing for %.0f s",
                self._path,
                STALLED_S,
            )
        finally:
            self._close()
            self.give_up()
