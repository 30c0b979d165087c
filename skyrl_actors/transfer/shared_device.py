"""Transfer between trainers and engines on the same GPUs, in device memory, bucket by bucket.

The rank on an engine's first device sends the weights to it. It sends the live weights while they
still equal the version, otherwise the version's file. Sharded weights are gathered once for all
engines that load them, so each rank has them for its own engine.
"""

from collections.abc import Sequence
from pathlib import Path

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.transfer.files import FileTransfer
from skyrl_actors.transfer.transport import EnginePlace, EngineTarget


class SharedDeviceTransfer(FileTransfer):
    """Open a stream from one process's device memory to another's on the same GPU.

    `shares`: the weights are sharded, so one gathering serves all engines of a delivery.
    """

    needs_group = True

    def __init__(
        self,
        folder: Path,
        checksums: bool,
        bucket_bytes: int,
        timeout_s: float,
        materialize: Materialize,
        shares: bool,
    ):
        super().__init__(folder, checksums)
        self.materialize: Materialize = materialize
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.shares = shares

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engines: Sequence[EngineTarget],
    ) -> Sequence[WeightStream | None]:
        """Open a stream for each engine, from the rank on its first device."""
        if manifest.kind == "lora":
            return [None] * len(engines)
        asked = [(engine.place.beside, self._stream_to(engine.place)) for engine in engines]
        return await group.open_streams(manifest, asked, self.materialize == "lazy")

    def _stream_to(self, place: EnginePlace) -> WeightStream:
        return WeightStream(
            "",
            0,
            1 + place.num_workers,
            "ipc",
            self.bucket_bytes,
            self.timeout_s,
            checksums=self.checksums and self.materialize == "lazy",  # if eager: in the manifest
        )
