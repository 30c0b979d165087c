"""The files of checkpoints and training runs: paths, metadata, listings, deletion.

They outlive the service.
"""

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from skyrl_actors import clock
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.shard_configs import keeper
from skyrl_actors.controller.alignment import Alignment
from skyrl_actors.controller.checkpoint_metadata import ABOUT_FILE, CheckpointMetadata
from skyrl_actors.controller.notes import UNREADABLE, read_json, report, sweep_abandoned, write_json
from skyrl_actors.controller.published import Published
from skyrl_actors.controller.removal import Removal
from skyrl_actors.controller.run_folders import (
    RUN_FILE,
    SPEC_FILE,
    RunFolders,
    checkpoints_in,
    keeps_all,
)
from skyrl_actors.messages.catalog import CheckpointEntry, RunEntry
from skyrl_actors.messages.errors import Conflict, Corrupt, NotFound
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.messages.paths import TinkerPath, owner_of
from skyrl_actors.messages.weights import SCORED_FILE
from skyrl_actors.storage.files import PARTIAL, fsync
from skyrl_actors.storage.mirror import Mirror

log = logging.getLogger(__name__)
SAVED_BY = "saved_by"
READS = 5  # of a checkpoint that is saved again meanwhile
NOTES = (ABOUT_FILE, SAVED_BY)  # for this service alone: who saved it, and from what
OWN_FILES = (SPEC_FILE, ABOUT_FILE, SAVED_BY, SCORED_FILE)


class CheckpointFolders:
    """The folder of all checkpoints.

    tinker://<model id>/<kind>/<name> is <root>/<model id>/<kind>/<name>. Ids and names are checked
    when a path is parsed.
    """

    def __init__(
        self,
        root: Path,
        wall: Callable[[], float] = clock.now,
        mirror_url: str | None = None,
        keeps: Callable[[str], bool] = keeps_all,
    ):
        """Use the checkpoints below `root`.

        `mirror_url` is a second place for each checkpoint, written before its request is
        answered. Only a process that changes checkpoints needs it. `keeps`: whether this process
        cleans up what belongs to an id.
        """
        self.root = root.expanduser().resolve()
        self._wall = wall
        self._metadata = CheckpointMetadata(wall)
        self._run_folders = RunFolders(self.root, keeps)
        self._published = Published(self.root, self.runs)
        self._mirror = Mirror(self.root, mirror_url, SPEC_FILE) if mirror_url else None
        self.alignment = Alignment(self._run_folders, self._mirror, self._published.forget)
        self.removal = Removal(self._run_folders, self._metadata, self._mirror)

    @property
    def keeps(self) -> Callable[[str], bool]:
        """Whether this process cleans up what belongs to an id."""
        return self._run_folders.keeps

    def folder(self, path: TinkerPath) -> Path:
        return self._run_folders.of(path.model_id) / path.kind / path.name

    def saved_by(self, folder: Path, request_id: str) -> bool:
        """Return whether an earlier attempt of this request wrote the folder."""
        mark = folder / SAVED_BY
        return mark.is_file() and mark.read_text() == request_id

    def new(self, path: TinkerPath, overwrite: bool, request_id: str) -> Path:
        """Return the folder to save into. Raises Conflict when the name is taken.

        Raises Unavailable when that is not known, as in `existing`.
        """
        folder = self.folder(path)
        if not folder.exists():
            self.alignment.check_known()
        if (
            folder.exists()
            and not overwrite
            and not self.saved_by(folder, request_id)
            and not self._metadata.is_expired(folder)
        ):
            raise Conflict(
                f"{path} exists already; use another name"
                + (" or overwrite=true" if path.kind == "weights" else "")
            )
        return folder

    def found(self, path: TinkerPath) -> tuple[Path, ModelSpec, str]:
        """Return a checkpoint's folder, the model that was saved there, and its version."""
        return self.existing(path), self.spec(path), self.version(path)

    def to_save(self, path: TinkerPath, overwrite: bool, request_id: str) -> tuple[Path, bool]:
        """Return the folder to save into, and whether this request wrote it before."""
        folder = self.new(path, overwrite, request_id)
        return folder, self.saved_by(folder, request_id)

    def size_for_others(self, path: TinkerPath) -> int:
        return sum(file.stat().st_size for file in self.files_for_others(path))

    def existing(self, path: TinkerPath) -> Path:
        """Return the folder of a checkpoint. Raises NotFound without one, or an expired one.

        Raises Unavailable if it is not here and the mirror has not been asked yet.
        """
        folder = self.folder(path)
        if not (folder / SPEC_FILE).is_file() or self._metadata.is_expired(folder):
            if not folder.exists():
                self.alignment.check_known()
            raise NotFound(f"no checkpoint {path}")
        return folder

    def version(self, path: TinkerPath) -> str:
        """Return a string that identifies this save of the checkpoint.

        It changes when the name is removed and saved again. It does not change when the folder is
        copied to another machine.
        """
        mark = self.existing(path) / SAVED_BY
        if not mark.is_file():  # a copy of another run's checkpoint
            return self._timed_version(path)
        return f"{path}#{hashlib.blake2b(mark.read_bytes(), digest_size=8).hexdigest()}"

    def is_version(self, path: TinkerPath, version: str) -> bool:
        """Return whether the checkpoint still has this version.

        Older releases used the time of the save as the version; such versions match, too. Raises
        NotFound when there is no such checkpoint.
        """
        return version in (self.version(path), self._timed_version(path))

    def _timed_version(self, path: TinkerPath) -> str:
        return f"{path}#{(self.existing(path) / SPEC_FILE).stat().st_mtime_ns}"

    def spec(self, path: TinkerPath) -> ModelSpec:
        """Return the model that was saved there."""
        try:
            content = json.loads((self.existing(path) / SPEC_FILE).read_text())
            lora = content.pop("lora")
            return ModelSpec(**content, lora=LoraSpec(**lora) if lora else None)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Corrupt(
                f"checkpoint {path} is damaged: its {SPEC_FILE} cannot be read ({error!r})"
            ) from None

    def note(self, folder: Path, user_metadata: dict[str, str], ttl_seconds: int | None) -> None:
        """Write the client's metadata and lifetime of a checkpoint into its folder."""
        self._metadata.write(
            folder, user_metadata=user_metadata, expires_at=self._metadata.end_of(ttl_seconds)
        )
        self.alignment.put(folder)

    def set_ttl(self, path: TinkerPath, ttl_seconds: int | None) -> None:
        self._change(self.existing(path), expires_at=self._metadata.end_of(ttl_seconds))

    def set_public(self, path: TinkerPath, public: bool) -> None:
        """Publish a checkpoint to the holders of other API keys, or withdraw it."""
        folder = self.existing(path)
        self._published.note(path.model_id)  # first, or a crash could hide what is public
        self._change(folder, public=public)

    def files_for_others(self, path: TinkerPath) -> list[Path]:
        """Return the files that other tools read: all except the service's own."""
        return sorted(
            file
            for file in self.existing(path).iterdir()
            if file.name not in OWN_FILES and not file.name.startswith(".")
        )

    def copy(
        self, source: TinkerPath, target: TinkerPath, session_id: str, ttl_seconds: int | None
    ) -> None:
        """Copy a checkpoint into a new training run. A repeat changes nothing.

        Raises Conflict when the training run exists already. The caller makes a repeat wait for
        the end of the first copy (`Disk.change`).
        """
        folder, spec = self.folder(target), replace(self.spec(source), model_id=target.model_id)
        if not folder.exists() or self._metadata.read(folder).get("copied_from") != str(source):
            self._copy(source, target, folder, spec, ttl_seconds)
        self.note_run(spec, session_id, {})
        self.alignment.put(folder)

    def _copy(
        self,
        source: TinkerPath,
        target: TinkerPath,
        folder: Path,
        spec: ModelSpec,
        ttl_seconds: int | None,
    ) -> None:
        self.alignment.check_known()
        if (self._run_folders.of(target.model_id) / RUN_FILE).exists():
            raise Conflict(
                f"training run {target.model_id} exists already; use another model_seq_id"
            )
        sweep_abandoned(folder.parent)  # of a copy that a killed controller made
        staging = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}{PARTIAL}")
        try:
            self._copy_one_save(source, staging)
            (staging / SPEC_FILE).write_text(json.dumps(asdict(spec), indent=2))
            self._metadata.write(
                staging, copied_from=str(source), expires_at=self._metadata.end_of(ttl_seconds)
            )
            for file in staging.iterdir():
                fsync(file)
            staging.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise a repeat of this request was faster
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _copy_one_save(self, source: TinkerPath, staging: Path) -> None:
        """Copy the files of one save, although the checkpoint may be saved again meanwhile."""
        for _ in range(READS):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            try:
                version = self.version(source)
                for file in self.existing(source).iterdir():
                    if file.name not in OWN_FILES:
                        shutil.copyfile(file, staging / file.name)
                if self.version(source) == version:
                    return
            except FileNotFoundError:  # it is being replaced
                continue
        raise Conflict(f"{source} was saved again during each of {READS} attempts to copy it")

    def is_public(self, path: TinkerPath) -> bool:
        folder = self.folder(path)
        if not folder.exists():
            self.alignment.check_known()
        published = bool(self._metadata.read(folder).get("public"))
        return published and not self._metadata.is_expired(folder)

    def delete(self, path: TinkerPath) -> None:
        self.removal.remove(self.existing(path))

    def note_run(self, spec: ModelSpec, session_id: str, user_metadata: dict[str, str]) -> None:
        """Record the training run of a model. A repeat changes nothing."""
        folder = self._run_folders.of(spec.model_id)
        if read_json(folder / RUN_FILE) is None:
            folder.mkdir(parents=True, exist_ok=True)
            rank = spec.lora.rank if spec.lora else None
            entry = asdict(
                RunEntry(
                    run_id=spec.model_id,
                    session_id=session_id,
                    base_model=spec.base_model,
                    lora_rank=rank,
                    created_at=self._wall(),
                    user_metadata=user_metadata,
                )
            )
            del entry["checkpoints"]
            write_json(folder / RUN_FILE, entry)

    def runs(self, owner: str | None = None, published: bool = False) -> list[RunEntry]:
        """Return training runs, newest first.

        With `owner`, return only the runs of that owner. With `published` too, add runs of others
        that have published checkpoints.
        """
        found = self._readable(self._run_folders.all(owner))
        if owner is not None:
            found = [run for run in found if owner_of(run.run_id) == owner]
            if published:
                found += self._readable(self._published_by_others(owner))
        return sorted(found, key=lambda run: run.created_at, reverse=True)

    def _readable(self, folders: Iterable[Path]) -> list[RunEntry]:
        """Read the runs one by one. Report a damaged run and leave it out."""
        found = list[RunEntry]()
        for folder in folders:
            try:
                found.append(self._run(folder))
            except UNREADABLE as error:
                report(str(folder / RUN_FILE), repr(error))
        return found

    def _published_by_others(self, owner: str) -> list[Path]:
        folders = [
            self._run_folders.of(run_id)
            for run_id in self._published.run_ids()
            if owner_of(run_id) != owner
        ]
        return [folder for folder in folders if (folder / RUN_FILE).is_file()]

    def run(self, model_id: str) -> RunEntry:
        """Return one training run. Raises NotFound for an unknown or damaged one."""
        folder = self._run_folders.of(model_id)
        if not (folder / RUN_FILE).is_file():
            self.alignment.check_known()
            raise NotFound(f"no training run {model_id!r}")
        try:
            return self._run(folder)
        except UNREADABLE as error:
            report(str(folder / RUN_FILE), repr(error))
            raise NotFound(
                f"training run {model_id!r} cannot be read: its {RUN_FILE} is damaged"
            ) from None

    def checkpoints(
        self, owner: str | None = None, published: bool = False
    ) -> list[CheckpointEntry]:
        """Return the checkpoints of `runs(owner, published)`, newest first."""
        return _newest_first(
            checkpoint for run in self.runs(owner, published) for checkpoint in run.checkpoints
        )

    def num_bytes(self, owner: str) -> int:
        """Return the bytes of all checkpoints of an owner."""
        return sum(checkpoint.num_bytes for checkpoint in self.checkpoints(owner))

    def _run(self, folder: Path) -> RunEntry:
        content = json.loads((folder / RUN_FILE).read_text())
        found = list[CheckpointEntry]()
        for item in checkpoints_in(folder):
            try:
                if not self._metadata.is_expired(item):
                    found.append(self._entry(content["run_id"], item))
            except FileNotFoundError:
                pass  # deleted during the listing
            except UNREADABLE as error:
                report(str(item), repr(error))
        return RunEntry(**content, checkpoints=tuple(_newest_first(found)))

    def size(self, path: TinkerPath) -> int:
        """Return the bytes of a checkpoint. Raises NotFound."""
        return _size_of(self.existing(path))

    def _entry(self, run_id: str, folder: Path) -> CheckpointEntry:
        saved = (folder / SPEC_FILE).stat().st_mtime
        return CheckpointEntry(
            run_id=run_id,
            kind=folder.parent.name,
            name=folder.name,
            time=saved,
            num_bytes=_size_of(folder),
            **self._metadata.read(folder),
        )

    def _change(self, folder: Path, **changes: Any) -> None:
        self._metadata.write(folder, **changes)
        if self._mirror:
            self._mirror.put_file(folder / ABOUT_FILE)


def folders_of(config: ClusterConfig, wall: Callable[[], float]) -> CheckpointFolders:
    """Return the checkpoints of a service, which the controller with this config changes."""
    keeps = keeper(config) if config.shards.count > 1 else keeps_all
    return CheckpointFolders(config.checkpoint_dir, wall, config.checkpoint_mirror, keeps)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if not file.name.startswith("."))


def _newest_first(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    return sorted(entries, key=lambda entry: (entry.time, entry.path), reverse=True)
