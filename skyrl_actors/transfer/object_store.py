"""Transfer between any hosts: Ray's object store copies files to shared memory at each engine."""

from typing import Any

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import WeightManifest, WeightStream
from skyrl_actors.transfer.files import FileTransfer
from skyrl_actors.transfer.transport import EnginePlace

DELIVERY_TIMEOUT_S = 600.0


class ObjectStoreTransfer(FileTransfer):
    """Copy a version's files to the hosts of the engines."""

    needs_group = True

    async def prove(self, group: ActorGroup, engines: list[ActorHandle[Any]]) -> None:
        """Do nothing: no folder is shared."""

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engine: ActorHandle[Any],
        place: EnginePlace,
    ) -> WeightStream | None:
        # A reference: the bytes do not pass through this process.
        content = group.read_files_ref(manifest.path)
        await remote.gather(
            [engine.receive.remote(manifest.path, content)],
            ["engine"],
            "deliver weights",
            DELIVERY_TIMEOUT_S,
        )
        return None

    async def discard(
        self, manifest: WeightManifest, group: ActorGroup, engines: list[ActorHandle[Any]]
    ) -> None:
        await super().discard(manifest, group, engines)
        drops = [engine.discard.remote(manifest.path) for engine in engines]
        await remote.gather(
            drops,
            [f"engine[{i}]" for i in range(len(drops))],
            "discard weights",
            DELIVERY_TIMEOUT_S,
        )
