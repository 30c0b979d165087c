"""Limit the bytes of an API key's checkpoints.

The bytes of a checkpoint are known when it is written. So a key with a limit writes one checkpoint
at a time, and each sees the bytes of those before it: they exceed the limit by one at most. The
bytes of a copy are known before, and it does not exceed the limit.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.keyed_locks import KeyedLocks
from skyrl_actors.controller.quotas import Quotas
from skyrl_actors.messages.errors import CapacityError
from skyrl_actors.messages.paths import TinkerPath, owner_of


class StorageQuota:
    """Admits checkpoints by the bytes that their API key may have."""

    def __init__(self, quotas: Quotas, folders: CheckpointFolders, disk: Disk):
        self._quotas = quotas
        self._folders = folders
        self._disk = disk
        self._writing = KeyedLocks()

    @asynccontextmanager
    async def room(self, model_id: str, num_bytes: int = 0) -> AsyncGenerator[None]:
        """Keep room for one checkpoint of a model while it is written. `num_bytes`: if known.

        Raises CapacityError when the API key has all its bytes.
        """
        owner = owner_of(model_id)
        if self._quotas.of(owner).checkpoint_bytes is None:
            yield
            return
        async with self._writing.holding(owner):
            most = self._quotas.of(owner).checkpoint_bytes
            used = await self._disk.read(self._folders.num_bytes, owner)
            if most is not None and (used >= most or used + num_bytes > most):
                new = f", the new one has {num_bytes}," if num_bytes else ""
                raise CapacityError(
                    f"the checkpoints of this API key have {used} bytes{new} and may have {most} "
                    "(checkpoint_bytes); delete some first, or save with ttl_seconds"
                )
            yield

    @asynccontextmanager
    async def room_for_copy(
        self, source: TinkerPath, target: TinkerPath, check_accepts: Callable[[str], None]
    ) -> AsyncGenerator[None]:
        """Keep room for a copy. A repeat needs none. Raises CapacityError or Unavailable.

        `check_accepts` raises if nothing new of an owner is accepted.
        """
        if await self._disk.read(self._folders.folder(target).exists):
            yield
            return
        check_accepts(owner_of(target.model_id))
        num_bytes = await self._disk.read(self._folders.size_for_others, source)
        async with self.room(target.model_id, num_bytes):
            yield
