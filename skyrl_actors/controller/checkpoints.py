"""Where checkpoints lie, and what a checkpoint says of itself."""

import json
from pathlib import Path

from skyrl_actors.messages.errors import Conflict, InternalError, NotFound
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath

SPEC_FILE = "model_spec.json"
SAVED_BY = "saved_by"


class CheckpointFolders:
    """tinker://<model id>/<kind>/<name> is <root>/<model id>/<kind>/<name>; ids and names were checked when parsed."""

    def __init__(self, root: Path):
        self.root = root.expanduser().resolve()

    def folder(self, path: TinkerPath) -> Path:
        folder = self.root / path.model_id.replace(":", "_") / path.kind / path.name
        if not folder.is_relative_to(self.root):
            raise InternalError(f"{path} leaves the checkpoint folder")
        return folder

    def saved_by(self, folder: Path, request_id: str) -> bool:
        """Whether this very request wrote the folder, before it could be answered."""
        mark = folder / SAVED_BY
        return mark.is_file() and mark.read_text() == request_id

    def new(self, path: TinkerPath, overwrite: bool, request_id: str) -> Path:
        folder = self.folder(path)
        if folder.exists() and not overwrite and not self.saved_by(folder, request_id):
            raise Conflict(f"{path} exists already; use another name" + (" or overwrite=true" if path.kind == "weights" else ""))
        return folder

    def existing(self, path: TinkerPath) -> Path:
        folder = self.folder(path)
        if not (folder / SPEC_FILE).is_file():
            raise NotFound(f"no checkpoint {path}")
        return folder

    def note(self, folder: Path, user_metadata: dict[str, str]) -> None:
        """Keep what the client said of its checkpoint beside it."""
        if user_metadata:
            staging = folder / ".user_metadata.partial"
            staging.write_text(json.dumps(user_metadata, indent=2))
            staging.replace(folder / "user_metadata.json")

    def version(self, path: TinkerPath) -> str:
        """Differs when the same name was removed and saved again."""
        return f"{path}#{(self.existing(path) / SPEC_FILE).stat().st_mtime_ns}"

    def spec(self, path: TinkerPath) -> ModelSpec:
        """The model that was saved there."""
        content = json.loads((self.existing(path) / SPEC_FILE).read_text())
        lora = content.pop("lora")
        return ModelSpec(**content, lora=LoraSpec(**lora) if lora else None)
