"""Weights from the policy's ranks to engines that can not read them where they are."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError, StateLost
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.base import EnginePlace, Transfer


class Deliveries:
    def __init__(self, policy: GroupSupervisor, folder: str):
        self._policy = policy
        self._folder = folder
        self._feeding: set[asyncio.Task[None]] = set()

    async def deliver(
        self, transfer: Transfer, manifest: WeightManifest, engine: ActorHandle | None, place: EnginePlace
    ) -> WeightStream | None:
        """Called in a phase, so it waits for no group: one that is made anew may need another phase."""
        if engine is None or not transfer.needs_group or not manifest.path.startswith(self._folder):
            return None  # the engine maps the file where it is
        group = self._policy.group
        if group is None or self._policy.down is not None:
            raise StateLost(f"the policy group is being made anew: {self._policy.down}")
        stream = await transfer.deliver(manifest, group, engine, place)
        if stream is not None and stream.fed:
            task = asyncio.create_task(self._fed(group.feed(manifest.version)))
            self._feeding.add(task)
            task.add_done_callback(self._feeding.discard)
        return stream

    async def _fed(self, feeding: Coroutine[Any, Any, None]) -> None:
        """While the engine takes it. What breaks, the engine hears at its end of the stream."""
        with suppress(InternalError):  # the supervisor makes the ranks anew
            await self._policy.guarded(feeding)

    async def detach(self) -> None:
        await remote.ended(*self._feeding)
