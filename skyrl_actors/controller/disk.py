"""Run work on checkpoint files in threads, with one pool for each kind of work.

Slow work of one kind delays no other kind. Owners of API keys share the threads for listings. The
event loop never accesses these files, because a disk may take seconds to answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.keyed_locks import KeyedLocks
from skyrl_actors.fair_slots import FairSlots
from skyrl_actors.messages.catalog import CatalogVerb, SessionVerb
from skyrl_actors.messages.errors import CapacityError, Unavailable
from skyrl_actors.messages.paths import owner_of

T = TypeVar("T")
Kind = Literal["few files", "listings", "whole checkpoints", "copies", "upkeep"]
THREADS: dict[Kind, int] = {
    "few files": 8,
    "listings": 2,  # they hold the interpreter lock for long
    "whole checkpoints": 8,
    "copies": 4,
    "upkeep": 2,
}
MOST_LISTINGS = 32  # of one owner, that run or wait
USUAL_MS = 100  # of a listing; how long it really took is counted when it ends
LISTINGS: tuple[CatalogVerb, ...] = ("runs", "run", "checkpoints")
OF_ONE: tuple[CatalogVerb | SessionVerb, ...] = ("run", "session")  # their argument is an id
CHANGES: tuple[CatalogVerb, ...] = ("copy", "set_public", "set_ttl", "delete")


class Disk:
    """Thread pools for checkpoint files, and a lock for each training run."""

    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(count, kind) for kind, count in THREADS.items()}
        self._locks = KeyedLocks()  # by run
        self._turns = FairSlots(THREADS["listings"])
        self._listings: Counter[str] = Counter()  # by owner
        self._changes: set[asyncio.Task[Any]] = set()

    async def run(self, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of work in a thread. Its exceptions are raised."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[kind], work, *arguments)

    async def listing(self, owner: str, work: Callable[..., T], *arguments: Any) -> T:
        """List what an owner has, in the owner's turn. Raises CapacityError if too many wait."""
        if owner and self._listings[owner] >= MOST_LISTINGS:
            raise CapacityError(
                f"{MOST_LISTINGS} listings of this API key are open; wait for their answers"
            )
        self._listings[owner] += 1
        try:
            async with self._turns.hold(owner, 1, USUAL_MS) as place:
                began = time.monotonic()
                try:
                    return await self.run("listings", work, *arguments)
                finally:
                    place.tokens = 1 + int(1000 * (time.monotonic() - began))
        finally:
            self._listings[owner] -= 1
            if not self._listings[owner]:
                del self._listings[owner]

    async def read(self, work: Callable[..., T], *arguments: Any) -> T:
        """Read a few files. Raises Unavailable when the disk cannot be read now."""
        try:
            return await self.run("few files", work, *arguments)
        except OSError as error:
            raise Unavailable(f"the checkpoint folder cannot be read: {error}") from None

    async def write(self, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        """Write files. Raises Unavailable when the disk cannot be written now."""
        try:
            return await self.run(kind, work, *arguments)
        except OSError as error:
            raise Unavailable(f"the checkpoint folder cannot be written: {error}") from None

    async def note(self, run_id: str, work: Callable[..., object], *arguments: Any) -> None:
        """Change a run for an operation. Raises Unavailable, so that the operation is retried."""
        try:
            await self.change(run_id, "whole checkpoints", work, *arguments)
        except OSError as error:
            raise Unavailable(f"the checkpoint folder cannot be written: {error}") from None

    async def change(self, run_id: str, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        """Change the files of a run, one change at a time; other runs are not locked.

        The run stays locked until the thread has finished, also when the caller is cancelled.
        """
        task = asyncio.ensure_future(self._changed(run_id, kind, work, *arguments))
        self._changes.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _changed(self, run_id: str, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        async with self._locks.holding(run_id):
            return await self.run(kind, work, *arguments)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, as the caller may have been cancelled

    async def catalog(self, folders: CheckpointFolders, verb: CatalogVerb, *arguments: Any) -> Any:
        """Call a method of `folders` in the pool of its kind, under the run's lock if it writes."""
        work = getattr(folders, verb)
        if verb in LISTINGS:
            folders.alignment.check_known()  # a script that finds nothing begins again
            return await self.listing(whose(verb, *arguments), work, *arguments)
        if verb not in CHANGES:
            return await self.run("few files", work, *arguments)
        changed = arguments[1] if verb == "copy" else arguments[0]
        return await self.change(
            changed.model_id, "copies" if verb == "copy" else "whole checkpoints", work, *arguments
        )


def whose(verb: CatalogVerb | SessionVerb, *arguments: Any) -> str:
    """Return the owner of a listing: the one that is asked for, or the owner of an id."""
    first: str = (arguments[0] if arguments else None) or ""
    return owner_of(first) if verb in OF_ONE else first
