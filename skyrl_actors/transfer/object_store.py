"""Transfer between any hosts: Ray's object store copies files to shared memory at each engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.files import FileTransfer
from skyrl_actors.transfer.transport import EngineTarget

DELIVERY_TIMEOUT_S = 600.0


class ObjectStoreTransfer(FileTransfer):
    """Copy a version's files to the hosts of the engines."""

    needs_group = True
    shares = True

    def __init__(self, folder: Path, checksums: bool):
        super().__init__(folder, checksums)
        self._adapters: dict[str, ray.ObjectRef[Any]] = {}  # read files, by path

    async def prove(self, group: ActorGroup, engines: list[ActorHandle[Any]]) -> None:
        """Do nothing: no folder is shared."""

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engines: Sequence[EngineTarget],
    ) -> Sequence[WeightStream | None]:
        """Read the files once, and copy them once to each host with engines.

        Files of adapters are small: they are kept for engines that ask later.
        """
        # A reference: the bytes do not pass through this process.
        content = self._adapters.get(manifest.path) or group.read_files_ref(manifest.path)
        if manifest.kind == "lora":
            self._adapters[manifest.path] = content
        try:
            await remote.gather(
                [engine.actor.receive.remote(manifest.path, content) for engine in engines],
                [f"engine[{i}]" for i in range(len(engines))],
                "deliver weights",
                DELIVERY_TIMEOUT_S,
            )
        except InternalError:
            self._adapters.pop(manifest.path, None)  # its rank may be gone
            raise
        return [None] * len(engines)

    async def discard(
        self, manifest: WeightManifest, group: ActorGroup, engines: list[ActorHandle[Any]]
    ) -> None:
        self._adapters.pop(manifest.path, None)
        await super().discard(manifest, group, engines)
        drops = [engine.discard.remote(manifest.path) for engine in engines]
        await remote.gather(
            drops,
            [f"engine[{i}]" for i in range(len(drops))],
            "discard weights",
            DELIVERY_TIMEOUT_S,
        )
