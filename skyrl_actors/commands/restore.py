"""`restore` and `check`: put a backup in place, and read a backup or a service's state again."""

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from skyrl_actors.commands.terminal import bar, console
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.load import load
from skyrl_actors.controller.checkpoints import RUN_FILE, CheckpointFolders
from skyrl_actors.journal import copying, opening
from skyrl_actors.journal.mirrored import mirror_of
from skyrl_actors.messages.errors import ConfigError, SkyrlActorsError
from skyrl_actors.messages.paths import parse_path
from skyrl_actors.storage.copies import (
    CHECKPOINTS,
    JOURNAL,
    MANIFEST,
    FileCopy,
    copied,
    faults,
    read_manifest,
)
from skyrl_actors.storage.objects import Objects

INCOMPLETE = "restore.incomplete"  # with it, a folder is no journal that a service would open
SHOWN_FAULTS = 20


def restore(source: Path, config: Path, overrides: Sequence[str]) -> None:
    """Put a backup in the places that a config names, which must be empty. Raises ConfigError.

    After an error or Ctrl-C they are empty again.
    """
    wanted = load(config, overrides)
    files, about = read_manifest(source)
    mirror = mirror_of(wanted.journal.mirror)
    if mirror is not None and mirror.has(opening.MARKER):
        raise ConfigError(f"{mirror.url} has a journal already; set another journal.mirror")
    engine, folder = copying.engine_of(wanted.journal)
    places = {JOURNAL: folder, CHECKPOINTS: wanted.checkpoint_dir.expanduser().resolve()}
    for place in places.values():
        if place.exists() and any(place.iterdir()):
            raise ConfigError(f"{place} is not empty; restore into empty folders")
    remote = engine if wanted.journal.url is not None else None
    if remote is not None:
        with remote.connect() as connection:
            opening.check_empty(connection)
    if found := list(faults(source, files)):
        raise ConfigError(f"the backup is damaged: {'; '.join(found[:3])}")
    try:
        _put(source, files, places, remote)
    except BaseException:  # also Ctrl-C
        for place in places.values():
            _emptied(place)
        raise
    finally:
        engine.dispose()
    command = " ".join(["skyrl-actors serve", str(config), *overrides])
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(about["made_at"]))
    console.print(
        f"restored {about['service']} as it was at {made} to {folder} and "
        f"{places[CHECKPOINTS]}; start it with `{command}`"
    )


def _put(source: Path, files: dict[str, FileCopy], places: dict[str, Path], remote: Any) -> None:
    """Copy all files, and the rows to another database if there is one."""
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = places[JOURNAL]
    (folder / INCOMPLETE).touch()
    for empty in (opening.PACKS, opening.SNAPSHOTS):
        (folder / empty).mkdir(mode=0o700)
    with bar("files", len(files)) as progress:
        for name in sorted(files, key=lambda name: name.endswith(f"/{opening.MARKER}")):
            part, _, rest = name.partition("/")
            if remote is None or name != f"{JOURNAL}/{opening.DATABASE}":
                copied(source / name, places[part] / rest)
            progress.advance(progress.task_ids[0])
    if remote is not None:
        copy = opening.connect_unchanged(source / JOURNAL / opening.DATABASE)
        copying.copy_rows(copy, remote, lambda _: None)
        copy.dispose()
    (folder / INCOMPLETE).unlink()


def _emptied(place: Path) -> None:
    for path in place.iterdir() if place.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check(target: Path, overrides: Sequence[str]) -> bool:
    """Check a backup, or the journal and checkpoints of a config. Return whether all is whole."""
    if target.is_dir():
        files, _ = read_manifest(target)
        problems = list(faults(target, files))
        database = opening.connect_unchanged(target / JOURNAL / opening.DATABASE)
        problems += _checked(database, target / JOURNAL, target / CHECKPOINTS)
        what = f"{len(files)} files of {MANIFEST}, and all that the journal names"
    else:
        wanted: ClusterConfig = load(target, overrides)
        engine, folder = copying.engine_of(wanted.journal)
        if not (folder / opening.MARKER).is_file():
            raise ConfigError(f"{folder} is no journal; set journal.folder to one")
        with copying.held(folder):
            mirror = mirror_of(wanted.journal.mirror)
            problems = _checked(engine, folder, wanted.checkpoint_dir, mirror)
        what = "all that the journal names, and the checkpoints"
    for problem in problems[:SHOWN_FAULTS]:
        console.print(f"[red]{problem}[/red]")
    if len(problems) > SHOWN_FAULTS:
        console.print(f"and {len(problems) - SHOWN_FAULTS} more")
    console.print(f"{what}: {'whole' if not problems else f'{len(problems)} faults'}")
    return not problems


def _checked(
    engine: Any, folder: Path, checkpoints: Path, mirror: Objects | None = None
) -> list[str]:
    """Return the faults of a journal and of checkpoints."""
    try:
        with bar("records", None) as progress:
            task = progress.task_ids[0]
            found = list(
                copying.faults(engine, folder, lambda n: progress.update(task, completed=n), mirror)
            )
    finally:
        engine.dispose()
    folders = CheckpointFolders(checkpoints)
    readable = {run.run_id.replace(":", "_"): run for run in folders.runs()}
    for file in sorted(folders.root.glob(f"*/{RUN_FILE}")):
        run = readable.get(file.parent.name)
        if run is None:
            found.append(f"{file} is damaged, so the checkpoints of this run were not checked")
            continue
        for checkpoint in run.checkpoints:
            found += _of_checkpoint(folders, checkpoint.path)
    return found


def _of_checkpoint(folders: CheckpointFolders, path: str) -> Iterator[str]:
    where = parse_path(path)
    try:
        folders.spec(where)
        for file in folders.existing(where).glob("*.safetensors"):
            with safe_open(file, "numpy"):  # reads the header, and compares it with the size
                pass
    except (SkyrlActorsError, SafetensorError, OSError) as error:
        yield f"checkpoint {path}: {error}"
