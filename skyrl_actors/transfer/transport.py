"""The transfer protocol: bring a version of a policy's weights from its trainers to the engines.

`publish` names the current weights as a version, which never changes again. A streaming transfer
need not write them while the live weights still equal the version. Before they change,
`ActorGroup.write_versions` writes the versions that may still be needed. `deliver` makes a version
readable at an engine, or opens a stream for that engine. The caller holds the phase in which both
may happen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray.actor import ActorHandle

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.precondition import OpPrecondition
from skyrl_actors.messages.weights import Materialize, WeightManifest, WeightStream


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """How many processes an engine has, and which policy rank shares its first device."""

    num_workers: int  # processes of the engine
    beside: int = 0  # the policy rank on its first device, if they share devices


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine that a version is delivered to."""

    actor: ActorHandle[Any]
    place: EnginePlace


class Receiver(Protocol):
    """An engine that may have received files. `managed`: it is one of this service."""

    @property
    def managed(self) -> bool: ...

    @property
    def health(self) -> str: ...

    @property
    def actor(self) -> ActorHandle[Any] | None: ...


class Transfer(Protocol):
    """One way to bring weights to engines."""

    @property
    def folder(self) -> Path:
        """Where versions are written; nothing else is there."""
        ...

    @property
    def shares(self) -> bool:
        """Whether one delivery of full weights to several engines costs less than several."""
        ...

    @property
    def needs_group(self) -> bool:
        """Whether the trainers must be up when weights are delivered."""
        ...

    @property
    def materialize(self) -> Materialize:
        """When full weights are written: "eager" at publication, "lazy" before they change."""
        ...

    async def prove(self, group: ActorGroup, engines: list[ActorHandle[Any]]) -> None:
        """Raise ConfigError if engines cannot read what trainers write."""
        ...

    async def publish(
        self, group: ActorGroup, model_id: str, precondition: OpPrecondition, version: str
    ) -> WeightManifest: ...

    async def deliver(
        self,
        manifest: WeightManifest,
        group: ActorGroup,
        engines: Sequence[EngineTarget],
    ) -> Sequence[WeightStream | None]:
        """Deliver a part to engines, and return the stream of each. A stream serves one load."""
        ...

    async def discard(
        self, manifest: WeightManifest, group: ActorGroup, engines: list[ActorHandle[Any]]
    ) -> None:
        """Free what `publish` and `deliver` wrote; never called for named checkpoints."""
        ...


def export_path(folder: Path, version: str) -> str:
    """Return the path of an exported version, in which underscores replace colons."""
    return str(folder / version.replace(":", "_"))
