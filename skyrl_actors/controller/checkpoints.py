"""Where checkpoints lie, what a checkpoint says of itself, and which runs there were. Files only; they outlive the service."""

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from skyrl_actors import clock
from skyrl_actors.controller.notes import UNREADABLE, read_json, report, sweep_abandoned, write_json
from skyrl_actors.controller.owner_index import OwnerIndex
from skyrl_actors.controller.published import Published
from skyrl_actors.files import fsync
from skyrl_actors.messages.catalog import CheckpointEntry, RunEntry
from skyrl_actors.messages.errors import Conflict, Corrupt, InternalError, NotFound
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import CHECKPOINT_KINDS, TinkerPath, owner_of
from skyrl_actors.messages.weights import SCORED_FILE
from skyrl_actors.storage import Mirror

log = logging.getLogger(__name__)
SPEC_FILE = "model_spec.json"
RUN_FILE = "run.json"
ABOUT_FILE = "about.json"
SAVED_BY = "saved_by"
DELETED = ".deleted"
LAST_TIME = 253_000_000_000  # in the year 9987: later ones are no date
ABOUT = {field.name for field in fields(CheckpointEntry)} - {"run_id", "kind", "name", "time", "num_bytes"}
OWN_FILES = (SPEC_FILE, ABOUT_FILE, SAVED_BY, SCORED_FILE)


class CheckpointFolders:
    """tinker://<model id>/<kind>/<name> is <root>/<model id>/<kind>/<name>; ids and names were checked when parsed."""

    def __init__(self, root: Path, wall: Callable[[], float] = clock.now, mirror_url: str | None = None):
        """`mirror_url`: where each checkpoint also lies before it is answered; for who changes checkpoints."""
        self.root = root.expanduser().resolve()
        self._wall = wall
        self._index = OwnerIndex(self.root)
        self._published = Published(self.runs)
        self._mirror = Mirror(self.root, mirror_url, SPEC_FILE) if mirror_url else None

    def align(self) -> int:
        """Fetch what the mirror has and this machine has not, and the other way round; how many checkpoints were fetched."""
        if self._mirror is None:
            return 0
        fetched = self._mirror.pull(RUN_FILE)
        for run in self._run_folders():
            for folder in _checkpoints_in(run):
                if not self._mirror.has(folder):
                    self._mirrored(folder)
        return fetched

    def _mirrored(self, folder: Path) -> None:
        if self._mirror:
            self._mirror.put(folder)
            run = folder.parent.parent / RUN_FILE
            if run.exists():
                self._mirror.put_file(run)

    def _run_folder(self, model_id: str) -> Path:
        folder = self.root / model_id.replace(":", "_")
        if not folder.is_relative_to(self.root):
            raise InternalError(f"{model_id} leaves the checkpoint folder")
        return folder

    def folder(self, path: TinkerPath) -> Path:
        return self._run_folder(path.model_id) / path.kind / path.name

    def saved_by(self, folder: Path, request_id: str) -> bool:
        """Whether this very request wrote the folder, before it could be answered."""
        mark = folder / SAVED_BY
        return mark.is_file() and mark.read_text() == request_id

    def new(self, path: TinkerPath, overwrite: bool, request_id: str) -> Path:
        folder = self.folder(path)
        if folder.exists() and not overwrite and not self.saved_by(folder, request_id) and not self._is_expired(folder):
            raise Conflict(f"{path} exists already; use another name" + (" or overwrite=true" if path.kind == "weights" else ""))
        return folder

    def found(self, path: TinkerPath) -> tuple[Path, ModelSpec, str]:
        """Its folder, the model that was saved there, and its version."""
        return self.existing(path), self.spec(path), self.version(path)

    def to_save(self, path: TinkerPath, overwrite: bool, request_id: str) -> tuple[Path, bool]:
        """The folder to save into, and whether this very request wrote it before."""
        folder = self.new(path, overwrite, request_id)
        return folder, self.saved_by(folder, request_id)

    def size_for_others(self, path: TinkerPath) -> int:
        return sum(file.stat().st_size for file in self.files_for_others(path))

    def existing(self, path: TinkerPath) -> Path:
        folder = self.folder(path)
        if not (folder / SPEC_FILE).is_file() or self._is_expired(folder):
            raise NotFound(f"no checkpoint {path}")
        return folder

    def version(self, path: TinkerPath) -> str:
        """Differs when the same name was removed and saved again; stays when the folder is copied to another machine."""
        mark = self.existing(path) / SAVED_BY
        if not mark.is_file():  # a copy of another run's checkpoint
            return self._timed_version(path)
        return f"{path}#{hashlib.blake2b(mark.read_bytes(), digest_size=8).hexdigest()}"

    def is_version(self, path: TinkerPath, version: str) -> bool:
        """Raises NotFound when there is none. `version` may be an older release's, which named the time of the save."""
        return version in (self.version(path), self._timed_version(path))

    def _timed_version(self, path: TinkerPath) -> str:
        return f"{path}#{(self.existing(path) / SPEC_FILE).stat().st_mtime_ns}"

    def spec(self, path: TinkerPath) -> ModelSpec:
        """The model that was saved there."""
        try:
            content = json.loads((self.existing(path) / SPEC_FILE).read_text())
            lora = content.pop("lora")
            return ModelSpec(**content, lora=LoraSpec(**lora) if lora else None)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Corrupt(f"checkpoint {path} is damaged: its {SPEC_FILE} cannot be read ({error!r})") from None

    def note(self, folder: Path, user_metadata: dict[str, str], ttl_seconds: int | None) -> None:
        """Keep what the client said of its checkpoint beside it."""
        self._write_about(folder, user_metadata=user_metadata, expires_at=self._end_of(ttl_seconds))
        self._mirrored(folder)

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        self._change(self.existing(path), expires_at=self._end_of(ttl_seconds))

    def set_public(self, path: TinkerPath, public: bool) -> None:
        self._change(self.existing(path), public=public)
        self._published.note(path.model_id)

    def files_for_others(self, path: TinkerPath) -> list[Path]:
        """What other tools read of a checkpoint: all but our own notes."""
        return sorted(
            file for file in self.existing(path).iterdir() if file.name not in OWN_FILES and not file.name.startswith(".")
        )

    def copy(self, source: TinkerPath, target: TinkerPath, session_id: str, ttl_seconds: int | None) -> None:
        """Under another run, which is made for it. Once: a repeat changes nothing. Raises Conflict when the place is taken.
        The caller sees to it that a repeat waits for the end of the first (`Disk.change`)."""
        folder, spec = self.folder(target), replace(self.spec(source), model_id=target.model_id)
        if not folder.exists() or _about(folder).get("copied_from") != str(source):
            self._copy(source, target, folder, spec, ttl_seconds)
        self.note_run(spec, session_id, {})
        self._mirrored(folder)

    def _copy(self, source: TinkerPath, target: TinkerPath, folder: Path, spec: ModelSpec, ttl_seconds: int | None) -> None:
        if (self._run_folder(target.model_id) / RUN_FILE).exists():
            raise Conflict(f"training run {target.model_id} exists already; use another model_seq_id")
        staging = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
        staging.mkdir(parents=True)
        for file in self.existing(source).iterdir():
            if file.name not in OWN_FILES:
                shutil.copyfile(file, staging / file.name)
        (staging / SPEC_FILE).write_text(json.dumps(asdict(spec), indent=2))
        self._write_about(staging, copied_from=str(source), expires_at=self._end_of(ttl_seconds))
        for file in staging.iterdir():
            fsync(file)
        try:
            staging.rename(folder)
        except OSError:
            shutil.rmtree(staging)
            if not folder.exists():  # else a repeat of this request was faster
                raise

    def is_public(self, path: TinkerPath) -> bool:
        folder = self.folder(path)
        return bool(_about(folder).get("public")) and not self._is_expired(folder)

    def delete(self, path: TinkerPath) -> None:
        self._remove(self.existing(path))

    def sweep(self) -> int:
        """Remove what has expired; returns how many checkpoints that were."""
        count = 0
        for run in self._run_folders():
            for left in run.glob(f"*/.*{DELETED}"):  # by a service that died while it deleted
                shutil.rmtree(left, ignore_errors=True)
            for place in (run, *(run / kind for kind in CHECKPOINT_KINDS)):
                sweep_abandoned(place)
            for folder in list(_checkpoints_in(run)):
                try:
                    if self._is_expired(folder):
                        self._remove(folder)
                        count += 1
                except OSError as error:
                    log.warning("%s has expired and can not be removed: %s", folder, error)
        return count

    def note_run(self, spec: ModelSpec, session_id: str, user_metadata: dict[str, str]) -> None:
        """Once for each model; a repeat changes nothing."""
        folder = self._run_folder(spec.model_id)
        if read_json(folder / RUN_FILE) is None:
            folder.mkdir(parents=True, exist_ok=True)
            rank = spec.lora.rank if spec.lora else None
            entry = asdict(RunEntry(spec.model_id, session_id, spec.base_model, rank, self._wall(), user_metadata))
            del entry["checkpoints"]
            write_json(folder / RUN_FILE, entry)

    def runs(self, owner: str | None = None, published: bool = False) -> list[RunEntry]:
        """Newest first. `owner`: only his, and with `published` those of others in which something is published."""
        found = self._readable(self._run_folders(owner))
        if owner is not None:
            found = [run for run in found if owner_of(run.run_id) == owner]
            if published:
                found += self._readable(self._published_by_others(owner))
        return sorted(found, key=lambda run: run.created_at, reverse=True)

    def _readable(self, folders: Iterable[Path]) -> list[RunEntry]:
        """Each on its own: a damaged one is reported and left out."""
        found = []
        for folder in folders:
            try:
                found.append(self._run(folder))
            except UNREADABLE as error:
                report(str(folder / RUN_FILE), repr(error))
        return found

    def _published_by_others(self, owner: str) -> list[Path]:
        folders = [self._run_folder(run_id) for run_id in self._published.run_ids() if owner_of(run_id) != owner]
        return [folder for folder in folders if (folder / RUN_FILE).is_file()]

    def run(self, model_id: str) -> RunEntry:
        folder = self._run_folder(model_id)
        if not (folder / RUN_FILE).is_file():
            raise NotFound(f"no training run {model_id!r}")
        try:
            return self._run(folder)
        except UNREADABLE as error:
            report(str(folder / RUN_FILE), repr(error))
            raise NotFound(f"training run {model_id!r} cannot be read: its {RUN_FILE} is damaged") from None

    def checkpoints(self, owner: str | None = None, published: bool = False) -> list[CheckpointEntry]:
        """Of all these runs, newest first."""
        return _newest_first(checkpoint for run in self.runs(owner, published) for checkpoint in run.checkpoints)

    def _run_folders(self, owner: str | None = None) -> list[Path]:
        folders = (self.root / name for name in self._index.names(owner))
        return [folder for folder in folders if (folder / RUN_FILE).is_file()]

    def _run(self, folder: Path) -> RunEntry:
        content = json.loads((folder / RUN_FILE).read_text())
        found = []
        for item in list(_checkpoints_in(folder)):
            try:
                if not self._is_expired(item):
                    found.append(self._entry(content["run_id"], item))
            except FileNotFoundError:
                pass  # deleted meanwhile
            except UNREADABLE as error:
                report(str(item), repr(error))
        return RunEntry(**content, checkpoints=tuple(_newest_first(found)))

    def _entry(self, run_id: str, folder: Path) -> CheckpointEntry:
        size = sum(file.stat().st_size for file in folder.iterdir() if not file.name.startswith("."))
        saved = (folder / SPEC_FILE).stat().st_mtime
        return CheckpointEntry(run_id, folder.parent.name, folder.name, saved, size, **_about(folder))

    def _end_of(self, ttl_seconds: int | None) -> float | None:
        return None if ttl_seconds is None else min(self._wall() + ttl_seconds, LAST_TIME)

    def _is_expired(self, folder: Path) -> bool:
        end = _about(folder).get("expires_at")
        return end is not None and end <= self._wall()

    def _write_about(self, folder: Path, **changes: Any) -> None:
        write_json(folder / ABOUT_FILE, _about(folder) | changes)

    def _change(self, folder: Path, **changes: Any) -> None:
        self._write_about(folder, **changes)
        if self._mirror:
            self._mirror.put_file(folder / ABOUT_FILE)

    def _remove(self, folder: Path) -> None:
        """Gone at once, whatever the size."""
        if self._mirror:
            self._mirror.remove(folder)
        hidden = folder.with_name(f".{folder.name}{DELETED}")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


def _checkpoints_in(run: Path) -> Iterator[Path]:
    for kind in CHECKPOINT_KINDS:
        for file in (run / kind).glob(f"*/{SPEC_FILE}"):
            if not file.parent.name.startswith("."):
                yield file.parent


def _newest_first(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    return sorted(entries, key=lambda entry: (entry.time, entry.path), reverse=True)


def _about(folder: Path) -> dict[str, Any]:
    """What is known of a checkpoint beside its files. Fields of other versions are left out."""
    content = read_json(folder / ABOUT_FILE) or {}
    about = {name: value for name, value in content.items() if name in ABOUT}
    end = about.get("expires_at")
    if end is not None:
        about["expires_at"] = min(end, LAST_TIME) if isinstance(end, int | float) and end == end else None
    return about
