"""Downloads by signed links are few, and end when their client reads nothing."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse

from skyrl_actors.api import downloads
from skyrl_actors.api.downloads import Download
from skyrl_actors.api.open_requests import OpenRequests
from skyrl_actors.messages.errors import CapacityError
from skyrl_actors.messages.paths import TinkerPath

PATH = TinkerPath("s1:train:0", "weights", "a")
SCOPE: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.4"}, "headers": []}


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downloads, "STALLED_S", 0.2)
    counts, closed = OpenRequests(2), list[str]()

    def blocks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async def stalled(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    download = Download(PATH, counts).of(
        StreamingResponse(blocks()), lambda: closed.append("closed")
    )
    await asyncio.wait_for(download(SCOPE, never, stalled), 10)
    assert closed == ["closed"]
    for _ in range(2):
        Download(PATH, counts)  # it counts no longer
    with pytest.raises(CapacityError, match="2 downloads of these checkpoints are open"):
        Download(PATH, counts)


async def test_a_download_is_sent_whole():
    counts, sent = OpenRequests(1), list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    await Download(PATH, counts).of(Response(b"content"))(SCOPE, never, send)
    assert b"".join(sent) == b"content"
    Download(PATH, counts).give_up()
    Download(PATH, counts)
