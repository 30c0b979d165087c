"""Send a large answer in parts, as fast as its client reads them.

A server that gets a whole body keeps in memory what its client does not read. So it gets one part
at a time. A client that reads nothing for `STALLED_S` is disconnected.
"""

import asyncio
import logging

from fastapi import Response
from starlette.types import Receive, Scope, Send

from skyrl_actors.transport.byte_budget import Lease

log = logging.getLogger(__name__)
PART = 256 * 2**10
STALLED_S = 30.0


class PacedResponse(Response):
    """A response that releases its lease when its body is sent or its client is gone."""

    def __init__(self, content: bytes, media_type: str, lease: Lease):
        super().__init__(content, media_type=media_type)
        self._lease = lease

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            for start in range(0, len(self.body), PART):
                part = self.body[start : start + PART]
                # The server returns when the client has read the earlier parts.
                async with asyncio.timeout(STALLED_S):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            log.warning(
                "an answer of %d bytes was cut off: its client read nothing for %.0f s",
                len(self.body),
                STALLED_S,
            )
        finally:
            self._lease.release()
