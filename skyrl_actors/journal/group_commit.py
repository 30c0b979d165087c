"""Group commit: all that waits while a commit is on its way shares the next one, and with it the cost of the disk's fsyncs.

Consumes entries from the event loop, writes them from one thread. What fails together is tried alone: one bad entry must
not refuse the others, and a passing fault may be over.
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
from skyrl_actors.messages.requests import ForwardBackward
from skyrl_actors.messages.results import LossOutput

log = logging.getLogger(__name__)
T = TypeVar("T")
SLOW_S = 5.0
BATCH_ENTRIES = 1024
BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Write:
    """What must become durable together, and who waits for it."""

    entries: tuple[Entry, ...]
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"


class GroupCommit:
    """`trouble` is why the last write failed, None when it succeeded."""

    def __init__(self, write: Callable[[Sequence[Entry]], None]):
        self.trouble: str | None = None
        self._write = write
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._mutex = threading.Lock()
        self._waiting: deque[Write] = deque()
        self._busy = False
        self._closing = False
        self._began = 0.0  # when the write that is under way was given to the thread

    @property
    def slow(self) -> str | None:
        """That a write takes so long that its client would better know."""
        took_s = time.monotonic() - self._began
        if not self._busy or took_s < SLOW_S:
            return None
        return f"a write has taken {took_s:.0f} s; the disk or the database does not answer"

    async def write(self, entries: tuple[Entry, ...]) -> None:
        """Durable when this returns. Raises Unavailable, or InvalidRequest for entries that can never be
        written; then nothing of it was written."""
        if self._closing:
            raise Unavailable("the journal is closed")
        loop = asyncio.get_running_loop()
        write = Write(entries, loop, loop.create_future())
        with self._mutex:
            self._waiting.append(write)
        loop.call_soon(self._next)  # soon: what else this turn of the loop brings shares the commit
        await write.done

    async def between(self, function: Callable[[], T]) -> T:
        """Run it where rows are written, while none are."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, function)

    async def close(self) -> None:
        """Returns when what was given is settled."""
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
        writing = self._writer.submit(self._write, [entry for write in batch for entry in write.entries])
        writing.add_done_callback(lambda done: self._on_written(batch, done.exception()))

    def _on_written(self, batch: list[Write], error: BaseException | None) -> None:
        if error is None or len(batch) == 1:
            self._settle(batch, error)
        else:
            for write in batch:
                alone = self._writer.submit(self._write, write.entries)
                alone.add_done_callback(lambda done, write=write: self._settle([write], done.exception()))
        with self._mutex:
            self._busy = False
        self._next()

    def _settle(self, writes: list[Write], error: BaseException | None) -> None:
        if isinstance(error, UserError):  # the entries are at fault, so `trouble` stays as it is
            writes[0].loop.call_soon_threadsafe(_wake, writes, error)
            return
        trouble = None if error is None else reason(error)
        if trouble != self.trouble:
            log.error("the journal can not write: %s", trouble) if trouble else log.info("the journal writes again")
        self.trouble = trouble
        refusal = None if trouble is None else Unavailable(f"the journal can not write: {trouble}")
        writes[0].loop.call_soon_threadsafe(_wake, writes, refusal)


def reason(error: BaseException) -> str:
    return str(error.orig) if isinstance(error, DBAPIError) and error.orig else str(error) or type(error).__name__


def _wake(writes: list[Write], refusal: SkyrlActorsError | None) -> None:
    for write in writes:
        if write.done.done():
            continue  # cancelled
        if refusal is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(refusal)


def _take(waiting: deque[Write]) -> list[Write]:
    """What makes the next pack: at least one write, within the bounds."""
    taken, size = [waiting.popleft()], 0
    while waiting and len(taken) < BATCH_ENTRIES:
        size += sum(_size(entry) for entry in taken[-1].entries)
        if size + sum(_size(entry) for entry in waiting[0].entries) > BATCH_BYTES:
            break
        taken.append(waiting.popleft())
    return taken


def _size(entry: Entry) -> int:
    if isinstance(entry, Accepted) and isinstance(entry.request, ForwardBackward):
        return entry.request.columns.nbytes
    if isinstance(entry, Answered) and isinstance(entry.result, LossOutput):
        return sum(array.nbytes for array in entry.result.fields.values())
    return 1024
