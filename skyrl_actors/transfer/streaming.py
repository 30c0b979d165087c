"""Transfer between any hosts by broadcast (gloo, NCCL), bucket by bucket.

Full weights go from the trainer's memory into vLLM's layers. The engine's host gets no file; the
extra memory is one bucket and the layer that is still incomplete. Adapters are small and go as
files.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.transfer.object_store import ObjectStoreTransfer
from skyrl_actors.transfer.transport import EngineTarget


class StreamTransfer(ObjectStoreTransfer):
    """Open a broadcast from the trainers to the workers of all engines that load a version."""

    def __init__(
        self,
        folder: Path,
        checksums: bool,
        backend: Literal["gloo", "nccl"],
        bucket_bytes: int,
        timeout_s: float,
        materialize: Materialize,
    ):
        super().__init__(folder, checksums)
        self.materialize: Materialize = materialize
        self.backend: Literal["gloo", "nccl"] = backend
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engines: Sequence[EngineTarget],
    ) -> Sequence[WeightStream | None]:
        if manifest.kind == "lora":
            return await super().deliver(manifest, group, engines)
        checked = self.checksums and self.materialize == "lazy"  # if eager: in the manifest
        first_ranks = accumulate((e.place.num_workers for e in engines), initial=1)
        *starts, world_size = first_ranks
        asked = WeightStream(
            "",
            0,
            world_size,
            self.backend,
            self.bucket_bytes,
            self.timeout_s,
            checksums=checked,
        )
        (opened,) = await group.open_streams(manifest, [(0, asked)], self.materialize == "lazy")
        return [replace(opened, first_rank=start) for start in starts]
