"""Write entries from one thread, and share each commit among all waiting writes.

Entries that arrive during a commit form the next one, so that they share the cost of its fsyncs. If
a commit fails, its writes are repeated one by one: a bad entry must not fail the others, and a
temporary fault may be over.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from skyrl_actors.journal.entries import Accepted, Answered, Entry
from skyrl_actors.messages.errors import SkyrlActorsError, Unavailable, UserError
from skyrl_actors.messages.sizes import size_of

log = logging.getLogger(__name__)
T = TypeVar("T")
SLOW_S = 5.0
BATCH_ENTRIES = 1024
BATCH_BYTES = 64 * 2**20
ROW_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Write:
    """Entries that must become durable together, and the future that waits for them."""

    entries: tuple[Entry, ...]
    num_bytes: int
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"


class GroupCommit:
    """Group commit. `trouble` is why the last write failed, or None when it succeeded."""

    def __init__(self, write: Callable[[Sequence[Entry]], None]):
        self.trouble: str | None = None
        self._write = write
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._mutex = threading.Lock()
        self._waiting: deque[Write] = deque()
        self._busy = False
        self._closing = False
        self._began = 0.0  # when the current write was passed to the thread

    @property
    def slow(self) -> str | None:
        """The reason to report a write that takes too long, or None."""
        took_s = time.monotonic() - self._began
        if not self._busy or took_s < SLOW_S:
            return None
        return f"a write has taken {took_s:.0f} s; the disk or the database does not answer"

    async def write(self, entries: tuple[Entry, ...]) -> None:
        """Write the entries durably. On an error none of them was written.

        Raises Unavailable, or InvalidRequest for entries that can never be written.
        """
        if self._closing:
            raise Unavailable("the journal is closed")
        loop = asyncio.get_running_loop()
        size = sum(map(_size, entries))
        write = Write(entries, size, loop, loop.create_future())
        with self._mutex:
            self._waiting.append(write)
        loop.call_soon(self._next)  # later, so that other writes of this iteration share the commit
        await write.done

    async def between(self, function: Callable[[], T]) -> T:
        """Run a function in the writing thread, between two writes."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, function)

    async def close(self) -> None:
        """Return when all writes have ended."""
        self._closing = True
        while self._busy or self._waiting:
            await self.between(lambda: None)
        await asyncio.to_thread(self._writer.shutdown)

    def _next(self) -> None:
        with self._mutex:
            if self._busy or not self._waiting:
                return
            self._busy, self._began = True, time.monotonic()
            batch = _take(self._waiting)
        writing = self._writer.submit(
            self._write, [entry for write in batch for entry in write.entries]
        )
        writing.add_done_callback(lambda done: self._on_written(batch, done.exception()))

    def _on_written(self, batch: list[Write], error: BaseException | None) -> None:
        if error is None or len(batch) == 1:
            self._settle(batch, error)
        else:
            for write in batch:
                alone = self._writer.submit(self._write, write.entries)
                alone.add_done_callback(
                    lambda done, write=write: self._settle([write], done.exception())
                )
        with self._mutex:
            self._busy = False
        self._next()

    def _settle(self, writes: list[Write], error: BaseException | None) -> None:
        if isinstance(error, UserError):  # the entries are at fault, so `trouble` stays as it is
            writes[0].loop.call_soon_threadsafe(_wake, writes, error)
            return
        trouble = None if error is None else reason(error)
        if trouble != self.trouble:
            if trouble:
                log.error("the journal cannot write: %s", trouble)
            else:
                log.info("the journal writes again")
        self.trouble = trouble
        refusal = None if trouble is None else Unavailable(f"the journal cannot write: {trouble}")
        writes[0].loop.call_soon_threadsafe(_wake, writes, refusal)


def reason(error: BaseException) -> str:
    """Return the database's own error message if there is one."""
    return (
        str(error.orig)
        if isinstance(error, DBAPIError) and error.orig
        else str(error) or type(error).__name__
    )


def _wake(writes: list[Write], refusal: SkyrlActorsError | None) -> None:
    for write in writes:
        if write.done.done():
            continue  # cancelled
        if refusal is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(refusal)


def _take(waiting: deque[Write]) -> list[Write]:
    """Take the writes of the next pack: at least one, within the limits."""
    taken = [waiting.popleft()]
    size = taken[0].num_bytes
    while waiting and len(taken) < BATCH_ENTRIES:
        size += waiting[0].num_bytes
        if size > BATCH_BYTES:
            break
        taken.append(waiting.popleft())
    return taken


def _size(entry: Entry) -> int:
    if isinstance(entry, Accepted):
        return ROW_BYTES + size_of(entry.request)
    return ROW_BYTES + size_of(entry.result) if isinstance(entry, Answered) else ROW_BYTES
