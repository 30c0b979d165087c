"""Moving a version of a policy's weights from its trainers to the engines.

`publish` names the weights as they are now: a version, which never changes again. What streams need not be written for that, while
the weights are that version still; before they change, `ActorGroup.write_versions` writes what somebody may need. `deliver` makes
a version readable where an engine runs, or opens a stream from which that engine will take it. The caller holds the phase in which
both may happen.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ray.actor import ActorHandle

from skyrl_actors.groups.actor_group import ActorGroup
from skyrl_actors.messages.turn import Turn
from skyrl_actors.messages.weights import Freeze, WeightManifest, WeightStream


@dataclass(frozen=True, slots=True)
class EnginePlace:
    num_workers: int  # processes of the engine
    beside: int = 0  # the policy rank on its first device, where they share devices


class Transfer(Protocol):
    @property
    def needs_group(self) -> bool:
        """Whether trainers must be there when weights are delivered."""
        ...

    @property
    def freeze(self) -> Freeze:
        """When full weights are written."""
        ...

    async def prove(self, group: ActorGroup, engines: list[ActorHandle]) -> None:
        """Raises ConfigError when engines can not read what trainers write."""
        ...

    async def publish(self, group: ActorGroup, model_id: str, turn: Turn, version: str) -> WeightManifest: ...

    async def deliver(
        self, manifest: WeightManifest, group: ActorGroup, engine: ActorHandle, place: EnginePlace
    ) -> WeightStream | None:
        """Full weights that stream are delivered anew for every load."""
        ...

    async def discard(self, manifest: WeightManifest, group: ActorGroup, engines: list[ActorHandle]) -> None:
        """Free what `publish` and `deliver` wrote. Manifests of named checkpoints are never given here."""
        ...


def export_path(folder: Path, version: str) -> str:
    return str(folder / version.replace(":", "_"))
