"""Limit the bytes of an API key's checkpoints.

A save is refused when the key has its bytes already, because its own bytes are known only when it
is written. So saves exceed the limit by one checkpoint of each model that saves at the same time. A
copy is refused if it would exceed the limit together with the copies that are being written.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from skyrl_actors.controller.checkpoints import CheckpointFolders
from skyrl_actors.controller.disk import Disk
from skyrl_actors.controller.quotas import Quotas
from skyrl_actors.messages.errors import CapacityError
from skyrl_actors.messages.paths import TinkerPath, owner_of


class StorageQuota:
    """Admits checkpoints by the bytes that their API key may have. Nobody waits for another."""

    def __init__(self, quotas: Quotas, folders: CheckpointFolders, disk: Disk):
        self._quotas = quotas
        self._folders = folders
        self._disk = disk
        # By owner and target: the bytes of a copy, and how many requests wait for it.
        self._copies: defaultdict[str, dict[TinkerPath, tuple[int, int]]] = defaultdict(dict)

    async def check(self, model_id: str) -> None:
        """Raise CapacityError when checkpoints of the model's API key have all their bytes."""
        owner = owner_of(model_id)
        if (most := self._quotas.of(owner).checkpoint_bytes) is not None:
            used = await self._disk.read(self._folders.num_bytes, owner)
            if used >= most:
                raise _full(f"have {used} bytes", most)

    @asynccontextmanager
    async def room_for_copy(
        self, source: TinkerPath, target: TinkerPath, check_accepts: Callable[[str], None]
    ) -> AsyncGenerator[None]:
        """Keep room for a copy. A repeat needs none. Raises CapacityError or Unavailable.

        `check_accepts` raises if nothing new of an owner is accepted.
        """
        owner = owner_of(target.model_id)
        is_there = await self._disk.read(self._folders.folder(target).exists)
        if not is_there:
            check_accepts(owner)
        if is_there or self._quotas.of(owner).checkpoint_bytes is None:
            yield
            return
        num_bytes = await self._disk.read(self._folders.size, source)
        copies = self._copies[owner]
        earlier = {path: size for path, (size, _) in copies.items() if path != target}
        _, waiting = copies.get(target, (0, 0))
        copies[target] = num_bytes, waiting + 1
        try:
            await self._check_copy(owner, target, num_bytes, earlier)
            yield
        finally:
            _, waiting = copies.pop(target)
            if waiting > 1:
                copies[target] = num_bytes, waiting - 1
            elif not copies:
                self._copies.pop(owner, None)

    async def _check_copy(
        self, owner: str, target: TinkerPath, num_bytes: int, earlier: dict[TinkerPath, int]
    ) -> None:
        """Raise CapacityError if a copy has no room beside the `earlier` ones."""
        while True:
            absent = await self._disk.read(self._absent, [*earlier])
            used = await self._disk.read(self._folders.num_bytes, owner)
            if await self._disk.read(self._absent, absent) == absent:  # none is counted twice
                break
        if not await self._disk.read(self._absent, [target]):
            return  # a repeat of one that has ended
        others = sum(earlier[path] for path in absent if path in self._copies[owner])
        most = self._quotas.of(owner).checkpoint_bytes
        if most is not None and used + others + num_bytes > most:
            raise _full(
                f"have {used} bytes, others that are copied now {others}, and the new one "
                f"{num_bytes}",
                most,
            )

    def _absent(self, targets: list[TinkerPath]) -> list[TinkerPath]:
        return [path for path in targets if not self._folders.folder(path).exists()]


def _full(what: str, most: int) -> CapacityError:
    return CapacityError(
        f"the checkpoints of this API key {what}; they may have {most} (checkpoint_bytes); delete "
        "some first, or save with ttl_seconds"
    )
