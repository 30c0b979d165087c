"""The folders of training runs below one folder.

Shards share them. Each shard cleans up only the folders of its own sessions.
"""

from collections.abc import Callable
from pathlib import Path

from skyrl_actors.controller.owner_index import OwnerIndex
from skyrl_actors.messages.paths import CHECKPOINT_KINDS, checked_id

SPEC_FILE = "model_spec.json"
RUN_FILE = "run.json"


def keeps_all(name: str) -> bool:
    """Return True: there is one controller, which cleans up every folder."""
    return True


class RunFolders:
    """The run of a model id is in <root>/<model id>, with "_" for ":"."""

    def __init__(self, root: Path, keeps: Callable[[str], bool]):
        self.root = root
        self.keeps = keeps  # whether this controller cleans up what belongs to an id
        self._index = OwnerIndex(root)

    def of(self, model_id: str) -> Path:
        """Return the folder of a run. Raises InvalidRequest for a text that is not an id."""
        return self.root / checked_id(model_id, "model id").replace(":", "_")

    def all(self, owner: str | None = None) -> list[Path]:
        """Return the folders of an owner's runs, or of all."""
        folders = (self.root / name for name in self._index.names(owner))
        return [folder for folder in folders if (folder / RUN_FILE).is_file()]

    def own(self) -> list[Path]:
        """Return the folders that this controller cleans up."""
        return [folder for folder in self.all() if self.keeps(folder.name)]

    def unrecorded(self) -> list[Path]:
        """Return the folders of this controller that are not, or not yet, those of a run."""
        folders = (self.root / name for name in self._index.names(None) if self.keeps(name))
        return [folder for folder in folders if not (folder / RUN_FILE).is_file()]


def checkpoints_in(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints."""
    return [
        file.parent
        for kind in CHECKPOINT_KINDS
        for file in (run / kind).glob(f"*/{SPEC_FILE}")
        if not file.parent.name.startswith(".")
    ]
