"""Bring published versions from the policy's ranks to engines, and free them again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from skyrl_actors.groups.supervisor import GroupSupervisor
from skyrl_actors.messages.errors import InternalError, PartDown
from skyrl_actors.messages.weights import SamplerWeights, WeightManifest, WeightStream
from skyrl_actors.storage.files import remove
from skyrl_actors.transfer.rounds import Rounds
from skyrl_actors.transfer.transport import EnginePlace, EngineTarget, Receiver, Transfer

log = logging.getLogger(__name__)
MOST_LEFT = 10_000


class Delivery:
    """The configured transfer with its ranks. It frees nothing outside of the transfer's folder."""

    def __init__(self, transfer: Transfer, policy: GroupSupervisor):
        self.transfer = transfer
        self._policy = policy
        self._rounds = Rounds(self._deliver)
        self._left: dict[str, WeightManifest] = {}  # by path: what somebody must still free
        self._freeing: set[str] = set()
        self._delivering: Counter[str] = Counter()

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
        if engine is None or not self.transfer.needs_group or not self._is_own(manifest):
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
        self._delivering[manifest.path] += 1
        try:
            return await self.transfer.deliver(manifest, self._policy.group, engines)
        finally:
            self._delivering[manifest.path] -= 1
            if not self._delivering[manifest.path]:
                del self._delivering[manifest.path]

    def unfreed(self, base_model: str) -> list[SamplerWeights]:
        """Return the parts of dropped versions whose files may still be there."""
        return [
            SamplerWeights(version=part.version, parts=(part,), base_model=base_model)
            for part in self._left.values()
        ]

    async def discard(self, weights: SamplerWeights, engines: Sequence[Receiver]) -> None:
        """Free what was written for a version. Files of named checkpoints stay.

        This does not wait for a restarting group, which may need devices that the caller's base
        model does not have, nor for an engine that starts. What they do not free now is freed with
        a later version.
        """
        own = [part for part in weights.parts if self._is_own(part)]
        self._left.update((part.path, part) for part in own)
        everyone = self._policy.group is not None and self._policy.down is None
        if self.transfer.needs_group:  # engines have copies
            everyone &= all(engine.health == "HEALTHY" for engine in engines if engine.managed)
        fault: InternalError | None = None
        # While somebody is missing, earlier parts would be asked for in vain.
        for part in list(self._left.values()) if everyone else own:
            if part.path in self._freeing:
                continue
            self._freeing.add(part.path)
            try:
                await self._free(part, engines)
                # A delivery that still runs writes what was just freed.
                if everyone and part.path not in self._delivering:
                    self._left.pop(part.path, None)
            except InternalError as error:
                fault = fault or error
            finally:
                self._freeing.discard(part.path)
        while len(self._left) > MOST_LEFT:
            log.warning("%s is never removed", self._left.pop(next(iter(self._left))).path)
        if fault is not None:
            raise fault

    def _is_own(self, part: WeightManifest) -> bool:
        return Path(part.path).is_relative_to(self.transfer.folder)

    async def _free(self, part: WeightManifest, engines: Sequence[Receiver]) -> None:
        if self._policy.group is not None and self._policy.down is None:
            living = [e.actor for e in engines if e.health == "HEALTHY" and e.actor is not None]
            await self.transfer.discard(part, self._policy.group, living)
            return
        try:
            await asyncio.to_thread(remove, Path(part.path))  # if it is on this machine
        except OSError as error:
            log.warning("%s is not removed before ranks run again: %s", part.path, error)
