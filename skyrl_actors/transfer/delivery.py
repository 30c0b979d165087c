"""Bring published versions from the policy's ranks to engines, and free them again."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError, PartDown
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest, WeightStream
from skyrl_actors.storage.files import remove
from skyrl_actors.transfer.rounds import Rounds
from skyrl_actors.transfer.transport import EnginePlace, EngineTarget, Transfer

log = logging.getLogger(__name__)
MOST_LEFT = 10_000


class Delivery:
    """The configured transfer with its ranks. Files outside of `folder` are not its own."""

    def __init__(self, transfer: Transfer, policy: GroupSupervisor, folder: Path):
        self.transfer = transfer
        self._policy = policy
        self._folder = str(folder)
        self._rounds = Rounds(self._deliver)
        self._left = deque[WeightManifest](maxlen=MOST_LEFT)  # to be freed

    async def deliver(
        self,
        manifest: WeightManifest,
        engine: ActorHandle[Any] | None,
        place: EnginePlace,
        possible: Callable[[], int],
        pause_s: float,
    ) -> WeightStream | None:
        """Deliver a part to an engine; return a stream, or None if the engine reads files.

        Engines that load the same full weights share a delivery: `possible` returns how many may
        load them now, and `pause_s` is the longest wait for them.

        The caller holds a phase, so this must not wait for a restarting group: the group may need
        another phase. Raises PartDown then.
        """
        if (
            engine is None
            or not self.transfer.needs_group
            or not manifest.path.startswith(self._folder)
        ):
            return None  # the engine maps the file where it is
        target = EngineTarget(engine, place)
        if not self.transfer.shares or manifest.kind == "lora":
            return (await self._deliver(manifest, (target,)))[0]
        return await self._rounds.join(manifest, target, possible, pause_s)

    async def _deliver(
        self, manifest: WeightManifest, engines: Sequence[EngineTarget]
    ) -> Sequence[WeightStream | None]:
        if self._policy.group is None or self._policy.down is not None:
            raise PartDown(f"{self._policy.name} is restarting: {self._policy.down}")
        return await self.transfer.deliver(manifest, self._policy.group, engines)

    def unfreed(self, base_model: str) -> list[SamplerWeights]:
        """Return the parts of dropped versions whose files may still be there."""
        return [
            SamplerWeights(version=part.version, parts=(part,), base_model=base_model)
            for part in self._left
        ]

    async def discard(self, weights: SamplerWeights, engines: list[ActorHandle[Any]]) -> None:
        """Free what was written for a version. Files of named checkpoints stay.

        This does not wait for a restarting group, which may need devices that the caller's base
        model does not have. What other machines do not free now is freed with a later version.
        """
        self._left.extend(part for part in weights.parts if part.path.startswith(self._folder))
        fault: InternalError | None = None
        for _ in range(len(self._left)):
            part = self._left.popleft()
            try:
                await self._free(part, engines)
            except InternalError as error:
                self._left.append(part)
                fault = fault or error
            except BaseException:
                self._left.append(part)
                raise
        if fault is not None:
            raise fault

    async def _free(self, part: WeightManifest, engines: list[ActorHandle[Any]]) -> None:
        if self._policy.group is not None and self._policy.down is None:
            await self.transfer.discard(part, self._policy.group, engines)
            return
        self._left.append(part)
        try:
            await asyncio.to_thread(remove, Path(part.path))  # if it is on this machine
        except OSError as error:
            log.warning("%s is not removed before ranks run again: %s", part.path, error)
