"""Transfer through files: the trainer writes them, and engines read them in place.

The files are in shared memory of one host or on shared storage. Full weights are one flat file, of
which every engine maps the same pages. Adapters are folders.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from skyrl_actors import remote
from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream
from skyrl_actors.transfer.transport import EngineTarget, export_path

PROBE_TIMEOUT_S = 60.0


class FileTransfer:
    """Write a version's files where all engines can read them."""

    needs_group = False
    shares = False
    materialize: Materialize = "eager"

    def __init__(self, folder: Path, checksums: bool):
        self.folder = folder
        self.checksums = checksums

    async def prove(self, group: ActorGroup, engines: list[ActorHandle[Any]]) -> None:
        probe, content = str(self.folder / "probe"), secrets.token_hex(8)
        await group.write_probe(probe, content)
        names = [f"engine[{i}]" for i in range(len(engines))]
        read = await remote.gather(
            [e.reads.remote(probe, content) for e in engines],
            names,
            "read a probe",
            PROBE_TIMEOUT_S,
        )
        if blind := [name for name, good in zip(names, read, strict=True) if not good]:
            raise ConfigError(
                f"transfer.folder {self.folder}: what the trainers write there cannot be read by "
                f"{', '.join(blind)}; "
                "give a folder that all nodes share, or use transfer.type=object_store or gloo"
            )
        await group.discard_export(probe)

    async def publish(
        self, group: ActorGroup, model_id: str, precondition: OpPrecondition, version: str
    ) -> WeightManifest:
        return await group.export_weights(
            model_id,
            precondition,
            export_path(self.folder, version),
            version,
            self.checksums,
            self.materialize,
        )

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engines: Sequence[EngineTarget],
    ) -> Sequence[WeightStream | None]:
        """Do nothing: the engines read the trainer's files."""
        return [None] * len(engines)

    async def discard(
        self, manifest: WeightManifest, group: ActorGroup, engines: list[ActorHandle[Any]]
    ) -> None:
        await group.discard_export(manifest.path)
