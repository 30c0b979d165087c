"""Threads for checkpoint files, apart by kind of work, so that what takes long delays nothing of another kind.

The event loop itself never touches these files: a disk may take seconds to answer.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.messages.catalog import CatalogVerb
from skyrl_actors.messages.errors import Unavailable

T = TypeVar("T")
Kind = Literal["few files", "listings", "whole checkpoints", "copies"]
THREADS: dict[Kind, int] = {"few files": 8, "listings": 4, "whole checkpoints": 8, "copies": 4}
LISTINGS: tuple[CatalogVerb, ...] = ("runs", "run", "checkpoints")
CHANGES: tuple[CatalogVerb, ...] = ("copy", "set_public", "set_ttl", "delete")


class Disk:
    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(count, kind) for kind, count in THREADS.items()}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # by run, with how many hold it or wait
        self._changes: set[asyncio.Task[Any]] = set()

    async def run(self, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        """The work's result, from a thread. What it raises is raised."""
        return await asyncio.get_running_loop().run_in_executor(self._pools[kind], work, *arguments)

    async def read(self, work: Callable[..., T], *arguments: Any) -> T:
        """A few files. Raises Unavailable when the disk can not be read now."""
        try:
            return await self.run("few files", work, *arguments)
        except OSError as error:
            raise Unavailable(f"the checkpoint folder can not be read: {error}") from None

    async def write(self, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        """Raises Unavailable when the disk takes nothing now: it may take it later."""
        try:
            return await self.run(kind, work, *arguments)
        except OSError as error:
            raise Unavailable(f"the checkpoint folder can not be written: {error}") from None

    async def note(self, run_id: str, work: Callable[..., object], *arguments: Any) -> None:
        """A change of a run that belongs to an operation. Raises Unavailable, so that the operation waits."""
        try:
            await self.change(run_id, "whole checkpoints", work, *arguments)
        except OSError as error:
            raise Unavailable(f"the checkpoint folder can not be written: {error}") from None

    async def change(self, run_id: str, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        """One change of a run's files at a time; other runs are changed meanwhile. The run stays locked until the thread is
        done, also when the caller gives up."""
        task = asyncio.ensure_future(self._changed(run_id, kind, work, *arguments))
        self._changes.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _changed(self, run_id: str, kind: Kind, work: Callable[..., T], *arguments: Any) -> T:
        async with self._locked(run_id):
            return await self.run(kind, work, *arguments)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it any more

    @asynccontextmanager
    async def _locked(self, run_id: str) -> AsyncGenerator[None]:
        lock, users = self._locks.get(run_id, (asyncio.Lock(), 0))
        self._locks[run_id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            users = self._locks[run_id][1] - 1
            if users:
                self._locks[run_id] = lock, users
            else:
                del self._locks[run_id]

    async def catalog(self, folders: CheckpointFolders, verb: CatalogVerb, *arguments: Any) -> Any:
        work = getattr(folders, verb)
        if verb in LISTINGS:
            return await self.run("listings", work, *arguments)
        if verb not in CHANGES:
            return await self.run("few files", work, *arguments)
        changed = arguments[1] if verb == "copy" else arguments[0]
        return await self.change(changed.model_id, "copies" if verb == "copy" else "whole checkpoints", work, *arguments)
