"""One host: the trainer writes a file in shared memory, every engine maps the same pages."""

from pathlib import Path

from ray.actor import ActorHandle

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.turn import Turn
from skyrl_actors.messages.weights import WeightManifest
from skyrl_actors.transfer.base import export_path


class ShmTransfer:
    def __init__(self, folder: Path):
        self.folder = folder

    async def publish(self, group: ActorGroup, model_id: str, turn: Turn, version: str) -> WeightManifest:
        return await group.export_weights(model_id, turn, export_path(self.folder, version), version)

    async def deliver(self, manifest: WeightManifest, group: ActorGroup, engine: ActorHandle) -> None:
        """The engine maps the trainer's file."""

    async def discard(self, manifest: WeightManifest, group: ActorGroup, engines: list[ActorHandle]) -> None:
        await group.discard_export(manifest.path)
