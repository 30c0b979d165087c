"""Send and receive length-prefixed frames over a stream, with bounds on buffered bytes.

Reading: a frame's length is checked before its memory is allocated. Before authentication a frame
has at most `HELLO_BYTES` and is not decoded. `hold` stops reading.

Writing: frames are sent in order. No frame is encoded while more than `WRITE_AHEAD` bytes are
unread by the other side. Large frames are sent in parts, so that other connections of the event
loop are served in between. A frame's large arrays follow its body. They are copied neither into the
frame nor out of it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from struct import Struct
from typing import cast

import numpy as np

from skyrl_actors.messages.errors import InvalidRequest, SkyrlActorsError

log = logging.getLogger(__name__)
HEAD = Struct(">QI")  # bytes that follow, number of arrays after the body
SIZE = Struct(">Q")
HELLO_BYTES = 128
READ_AHEAD = 2**20
WRITE_AHEAD = 2**20
PART = 2**20  # bytes of one read or write
LONGEST_FRAME = 2**30
ALIGNMENT = 16

Frame = list[bytes | memoryview]
Encode = Callable[[], Frame | Awaitable[Frame]]
OnFrame = Callable[[memoryview, int], None]


class Unreadable(Exception):
    """A frame is not a message of this protocol."""


def framed(body: bytes, beside: list[memoryview]) -> Frame:
    """Return the frame of a body and its arrays. Raises InvalidRequest when it is too long."""
    if not beside:
        _check_length(len(body))
        head = HEAD.pack(len(body), 0)
        return [head + body] if len(body) < PART else [head, memoryview(body)]
    parts: Frame = [b"".join(SIZE.pack(len(part)) for part in (body, *beside)), body]
    size = len(parts[0]) + len(body)
    for array in beside:
        padding = -size % ALIGNMENT
        parts += [bytes(padding), array]
        size += padding + array.nbytes
    _check_length(size)
    return [HEAD.pack(size, len(beside)), *parts]


def parts_of(content: memoryview, arrays: int) -> tuple[memoryview, list[memoryview]]:
    """Return the body and the arrays of a frame that has arrays, as views.

    Raises:
        ValueError: The frame is shorter than its parts.
    """
    end = SIZE.size * (arrays + 1)
    if end > len(content):
        raise ValueError("the frame is shorter than the sizes of its parts")
    sizes = [SIZE.unpack_from(content, SIZE.size * i)[0] for i in range(arrays + 1)]
    body, beside = content[end : end + sizes[0]], list[memoryview]()
    end += sizes[0]
    for size in sizes[1:]:
        start = end + -end % ALIGNMENT
        end = start + size
        beside.append(content[start:end])
    if end > len(content):
        raise ValueError("the frame is shorter than its parts")
    return body, beside


def _check_length(size: int) -> None:
    if size > LONGEST_FRAME:
        raise InvalidRequest(
            f"a message has {size} bytes and at most {LONGEST_FRAME} are allowed: "
            "send or request less at once"
        )


class FrameStream(asyncio.BufferedProtocol):
    """One connection. Frames are read one by one with `receive`, until `serve` sets a handler."""

    def __init__(self, stalled_s: float | None = None):
        """`stalled_s`: abort the connection after the other side has read nothing for this long."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_connected = False
        self._loop = asyncio.get_running_loop()
        self._stalled_s = stalled_s
        self._longest = HELLO_BYTES
        self._take: OnFrame | None = None
        self._relieved: Callable[[], None] = lambda: None
        self._next: asyncio.Future[bytes] | None = None
        self._held = False
        self._small = memoryview(bytearray(HEAD.size + HELLO_BYTES))
        self._start = self._end = 0  # unread bytes lie between these
        self._large: memoryview | None = None
        self._large_arrays = self._filled = 0
        self._room = asyncio.Event()
        self._room.set()
        self._queue: deque[tuple[Encode, asyncio.Future[None]]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._written = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_connected = True
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_AHEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._room.set()
        if self._next is not None and not self._next.done():
            self._next.set_exception(ConnectionError(str(exc or "it ended")))
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        """End the connection now. Unsent bytes are lost."""
        if self.is_connected:
            self.transport.abort()

    # reading

    async def receive(self) -> bytes:
        """Return the next short frame, before `serve`. Raises ConnectionError at the end."""
        if self.lost.done():
            raise ConnectionError("it ended")
        self._next = self._loop.create_future()
        self.release()
        self._loop.call_soon(self._parse)
        return await self._next

    def serve(self, take: OnFrame, relieved: Callable[[], None] = lambda: None) -> None:
        """Pass frames of any size to `take`, which decodes them.

        A frame for which it raises Unreadable ends this connection.

        Call this only after authentication. `relieved` is called when all queued frames are written
        and the other side reads again.
        """
        self._take, self._relieved, self._longest = take, relieved, LONGEST_FRAME
        left = self._small[self._start : self._end]
        self._small = np.empty(READ_AHEAD, np.uint8).data
        self._small[: len(left)] = left
        self._start, self._end = 0, len(left)
        self.release()
        self._loop.call_soon(self._parse)

    def hold(self) -> None:
        """Stop reading frames until `release`."""
        if not self._held:
            self._held = True
            self.transport.pause_reading()

    def release(self) -> None:
        """Read frames again after `hold`."""
        if self._held:
            self._held = False
            self.transport.resume_reading()
            self._loop.call_soon(self._parse)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._filled : self._filled + PART]
        return self._small[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._large is None:
            self._end += nbytes
            self._parse()
            if self._take is None and self._end == len(self._small):
                self.hold()  # it sends too much before the handshake has ended
            return
        self._filled += nbytes
        if self._filled == len(self._large):
            body, self._large = self._large, None
            self._deliver(body, self._large_arrays)

    def _parse(self) -> None:
        while self._is_wanted() and self._end - self._start >= HEAD.size:
            size, arrays = HEAD.unpack_from(self._small, self._start)
            if size > self._longest or arrays * SIZE.size > size:
                self.abort()  # the other side is no client of this service
                return
            begin, end = self._start + HEAD.size, self._start + HEAD.size + size
            if self._take is not None and (arrays or size > len(self._small) - HEAD.size):
                self._begin_large(begin, size, arrays)
            elif end <= self._end:
                self._start = end
                self._deliver(self._small[begin:end], 0)
            else:
                break
        self._make_space()

    def _is_wanted(self) -> bool:
        """Return whether a frame can be delivered now. A closing connection delivers none."""
        if self.transport.is_closing():
            return False
        if self._take is None:
            return self._next is not None and not self._next.done()
        return not self._held and self._large is None

    def _begin_large(self, begin: int, size: int, arrays: int) -> None:
        here = self._small[begin : min(self._end, begin + size)]
        large = np.empty(size, np.uint8).data
        large[: len(here)] = here
        self._start = begin + len(here)
        if len(here) == size:
            self._deliver(large, arrays)
        else:
            self._large, self._large_arrays, self._filled = large, arrays, len(here)

    def _make_space(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._small) or self._start > len(self._small) // 2:
            left = bytes(self._small[self._start : self._end])
            self._small[: len(left)] = left
            self._start, self._end = 0, len(left)

    def _deliver(self, body: memoryview, arrays: int) -> None:
        if self._take is not None:
            understood = False
            try:
                self._take(body, arrays)
                understood = True
            except Unreadable as error:
                log.error("a connection is closed: %s", error)
            finally:
                if not understood:
                    self.abort()
        elif self._next is not None and not self._next.done():
            self._next.set_result(bytes(body))

    # writing

    def pause_writing(self) -> None:
        self._room.clear()
        if self._stalled_s is not None:
            self._timer = self._loop.call_later(
                self._stalled_s, self._check_progress, self._taken()
            )

    def resume_writing(self) -> None:
        self._stop_timer()
        self._room.set()
        if not self.is_behind:
            self._relieved()

    @property
    def is_behind(self) -> bool:
        """Whether frames are queued or the other side reads too slowly."""
        return self._sending is not None or not self._room.is_set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _taken(self) -> int:
        return self._written - self.transport.get_write_buffer_size()

    def _check_progress(self, taken_before: int) -> None:
        taken = self._taken()
        if taken == taken_before or self._stalled_s is None:
            self.abort()
        else:
            self._timer = self._loop.call_later(self._stalled_s, self._check_progress, taken)

    async def writable(self) -> None:
        """Return when the other side has read all but a little of what was sent."""
        await self._room.wait()

    def send_short(self, content: bytes) -> None:
        """Send a frame of the handshake."""
        self._write(HEAD.pack(len(content), 0) + content)

    def send(self, encode: Encode) -> asyncio.Future[None] | None:
        """Send the frame that `encode` returns; return None if it was written at once.

        A short frame is written at once when no other frame is queued. Other frames are queued and
        sent whole, in order, even if the returned future is not awaited. For a large or slow frame
        `encode` returns an awaitable, which builds the frame only when it is sent.
        """
        frame: Frame | Awaitable[Frame] | None = None
        if self._sending is None and self._room.is_set():
            frame = encode()
            if isinstance(frame, list) and len(frame) == 1:
                self._write(frame[0])
                return None
        sent: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(((lambda: frame) if frame is not None else encode, sent))
        if self._sending is None:
            self._sending = self._loop.create_task(self._send_queued())
        return sent

    async def _send_queued(self) -> None:
        try:
            while self._queue:
                if not self._room.is_set():
                    await self.writable()
                encode, sent = self._queue.popleft()
                try:
                    await self._send_encoded(encode)
                except SkyrlActorsError as error:
                    if not sent.cancelled():
                        sent.set_exception(error)
                    continue
                if not sent.cancelled():
                    sent.set_result(None)
        finally:
            self._sending = None
        self._relieved()

    async def _send_encoded(self, encode: Encode) -> None:
        if self.transport.is_closing():
            return
        frame = encode()
        await self._send_frame(frame if isinstance(frame, list) else await frame)

    async def _send_frame(self, frame: Frame) -> None:
        if len(frame) == 1:
            self._write(frame[0])
            return
        for whole in frame:
            for start in range(0, len(whole), PART):
                await self.writable()
                self._write(whole[start : start + PART])
                await asyncio.sleep(0)  # serve other connections between two parts

    def _write(self, content: bytes | memoryview) -> None:
        if not self.transport.is_closing():
            self._written += len(content)
            self.transport.write(content)
