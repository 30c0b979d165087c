"""Any hosts, by broadcast (gloo, NCCL): full weights go from the trainer's memory into vLLM's layers, one bucket at a time.

Beside the engine nothing is written: its extra memory is one bucket and the layer that is not whole yet. Adapters are small and
travel as files.
"""

from pathlib import Path
from typing import Literal

from ray.actor import ActorHandle

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import Freeze, WeightManifest, WeightStream
from skyrl_actors.transfer.base import EnginePlace
from skyrl_actors.transfer.object_store import ObjectStoreTransfer


class StreamTransfer(ObjectStoreTransfer):
    def __init__(
        self, folder: Path, checksums: bool, backend: Literal["gloo", "nccl"], bucket_bytes: int, timeout_s: float, freeze: Freeze,
        shards: bool,
    ):  # fmt: skip
        super().__init__(folder, checksums)
        self.freeze: Freeze = freeze
        self.shards = shards
        self.backend: Literal["gloo", "nccl"] = backend
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s

    async def deliver(
        self, manifest: WeightManifest, group: ActorGroup, engine: ActorHandle, place: EnginePlace
    ) -> WeightStream | None:
        if manifest.kind == "lora":
            return await super().deliver(manifest, group, engine, place)
        checked = self.checksums and self.freeze == "when_needed"  # else they are in the manifest
        asked = WeightStream("", 0, 1 + place.num_workers, self.backend, self.bucket_bytes, self.timeout_s, checksums=checked)
        return await group.open_stream(manifest, asked, gathers=self.shards and self.freeze == "when_needed")
