"""Transfer between any hosts by broadcast (gloo, NCCL), bucket by bucket.

Full weights go from the trainer's memory into vLLM's layers. The engine's host gets no file; the
extra memory is one bucket and the layer that is still incomplete. Adapters are small and go as
files.
"""

from pathlib import Path
from typing import Any, Literal

from ray.actor import ActorHandle

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.transfer.object_store import ObjectStoreTransfer
from skyrl_actors.transfer.transport import EnginePlace


class StreamTransfer(ObjectStoreTransfer):
    """Open a broadcast from the trainers to the workers of one engine."""

    def __init__(
        self,
        folder: Path,
        checksums: bool,
        backend: Literal["gloo", "nccl"],
        bucket_bytes: int,
        timeout_s: float,
        materialize: Materialize,
        shards: bool,
    ):
        super().__init__(folder, checksums)
        self.materialize: Materialize = materialize
        self.shards = shards
        self.backend: Literal["gloo", "nccl"] = backend
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engine: ActorHandle[Any],
        place: EnginePlace,
    ) -> WeightStream | None:
        if manifest.kind == "lora":
            return await super().deliver(manifest, group, engine, place)
        checked = self.checksums and self.materialize == "lazy"  # if eager: in the manifest
        asked = WeightStream(
            "",
            0,
            1 + place.num_workers,
            self.backend,
            self.bucket_bytes,
            self.timeout_s,
            checksums=checked,
        )
        return await group.open_stream(
            manifest, asked, gathers=self.shards and self.materialize == "lazy"
        )
