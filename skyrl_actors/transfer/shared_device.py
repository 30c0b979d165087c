"""Transfer between trainers and engines on the same GPUs, in device memory, bucket by bucket.

The rank on an engine's first device sends the weights. It sends the live weights while they still
equal the version. Otherwise, or if ranks hold shards, it reads the version from a file.
"""

from collections.abc import Sequence
from pathlib import Path

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.transfer.files import FileTransfer
from skyrl_actors.transfer.transport import EnginePlace, EngineTarget


class SharedDeviceTransfer(FileTransfer):
    """Open a stream from one process's device memory to another's on the same GPU."""

    needs_group = True

    def __init__(
        self,
        folder: Path,
        checksums: bool,
        bucket_bytes: int,
        timeout_s: float,
        materialize: Materialize,
    ):
        super().__init__(folder, checksums)
        self.materialize: Materialize = materialize
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engines: Sequence[EngineTarget],
    ) -> Sequence[WeightStream | None]:
        """Open a stream for each engine, from the rank on its first device."""
        return [await self._opened(manifest, group, engine.place) for engine in engines]

    async def _opened(
        self, manifest: WeightManifest, group: ActorGroup, place: EnginePlace
    ) -> WeightStream | None:
        if manifest.kind == "lora":
            return None
        checked = self.checksums and self.materialize == "lazy"  # if eager: in the manifest
        asked = WeightStream(
            "",
            0,
            1 + place.num_workers,
            "ipc",
            self.bucket_bytes,
            self.timeout_s,
            checksums=checked,
        )
        return await group.open_stream(manifest, asked, place.beside)
