"""Trainers and engines on the same GPUs: weights go from one process's memory of a device to another's, one bucket at a time.

Each engine is given the weights by the rank on its first device: from where they were trained while they are that version still,
from a file when they are not, or when ranks hold shards of them.
"""

from pathlib import Path

from ray.actor import ActorHandle

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import Freeze, WeightManifest, WeightStream
from skyrl_actors.transfer.base import EnginePlace
from skyrl_actors.transfer.files import FileTransfer


class SharedDeviceTransfer(FileTransfer):
    needs_group = True

    def __init__(self, folder: Path, checksums: bool, bucket_bytes: int, timeout_s: float, freeze: Freeze):
        super().__init__(folder, checksums)
        self.freeze: Freeze = freeze
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s

    async def deliver(
        self, manifest: WeightManifest, group: ActorGroup, engine: ActorHandle, place: EnginePlace
    ) -> WeightStream | None:
        if manifest.kind == "lora":
            return None
        checked = self.checksums and self.freeze == "when_needed"  # else they are in the manifest
        asked = WeightStream("", 0, 1 + place.num_workers, "ipc", self.bucket_bytes, self.timeout_s, checksums=checked)
        return await group.open_stream(manifest, asked, place.beside)
