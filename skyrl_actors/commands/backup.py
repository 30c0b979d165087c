"""`backup`, `restore` and `check`: one consistent copy of journal and checkpoints.

The copy of the database comes first. Every file that one of its rows names is on the disk already
and never changes, and a note in the journal's folder forbids its removal meanwhile. Checkpoints are
copied last, so the copy has those that the journal knows, and possibly newer ones.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl_actors.commands.terminal import bar, console
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.load import load
from skyrl_actors.controller.checkpoints import SAVED_BY, SPEC_FILE, CheckpointFolders
from skyrl_actors.journal import copying, opening
from skyrl_actors.messages.errors import ConfigError, SkyrlActorsError
from skyrl_actors.storage.copies import (
    MANIFEST,
    FileCopy,
    copied,
    described,
    faults,
    read_manifest,
    write_manifest,
)

ATTEMPTS = 3
JOURNAL, CHECKPOINTS = "journal", "checkpoints"
PASSING = (".partial", ".deleted")  # ends of names of files that are being written or removed
SHOWN_FAULTS = 20
Files = dict[str, FileCopy]


def backup(config: Path, target: Path, overrides: Sequence[str], since: Path | None) -> None:
    """Copy a service's journal and checkpoints, while it runs or not. Raises ConfigError."""
    wanted = load(config, overrides)
    engine, folder = copying.engine_of(wanted.journal)
    if not (folder / opening.MARKER).is_file():
        raise ConfigError(f"{folder} is no journal; set journal.folder to one")
    staging = _staging(target)
    previous = None if since is None else _previous(since)
    began = time.monotonic()
    try:
        with copying.held(folder) as hold:
            files = _copied_journal(engine, folder, staging / JOURNAL, previous, hold.renew)
            files |= _copied_checkpoints(wanted.checkpoint_dir, staging / CHECKPOINTS, hold.renew)
        about = {"service": wanted.name, "made_at": time.time()}
        write_manifest(staging, files, about)
        staging.rename(target)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        engine.dispose()
    size = sum(file.num_bytes for file in files.values())
    console.print(
        f"{target}: {len(files)} files, {size / 2**30:.3f} GiB, "
        f"{time.monotonic() - began:.1f} s. `skyrl-actors check {target}` reads it again"
    )


def _staging(target: Path) -> Path:
    if target.exists():
        raise ConfigError(f"{target} exists already; a backup needs a new folder")
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)  # left by an interrupted backup
    staging.mkdir(parents=True, mode=0o700)
    return staging


def _previous(folder: Path) -> Path:
    read_manifest(folder)
    return folder / JOURNAL


def _copied_journal(
    engine: Any, folder: Path, target: Path, previous: Path | None, renew: Callable[[], None]
) -> Files:
    """Copy the database and the files that its rows name.

    A sweep that began before it was forbidden may still remove a file; then all is copied again.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _copied_once(engine, folder, target, previous, renew)
        except FileNotFoundError as error:
            shutil.rmtree(target, ignore_errors=True)
            if attempt == ATTEMPTS:
                raise ConfigError(
                    f"{error.filename} is missing, and a row of the journal names it; "
                    "`skyrl-actors check` lists all faults of the journal"
                ) from None
    raise AssertionError("unreachable")


def _copied_once(
    engine: Any, folder: Path, target: Path, previous: Path | None, renew: Callable[[], None]
) -> Files:
    target.mkdir(parents=True, mode=0o700)
    database = target / opening.DATABASE
    copy = opening.connect(opening.database_url(target, None))
    try:
        with bar("rows", None) as progress:
            task = progress.task_ids[0]
            copying.copy_rows(engine, copy, lambda n: progress.update(task, completed=n))
        packs, snapshots = copying.named_files(copy)
        epoch = copying.value_of(copy, "epoch") or "0"
        with copy.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=DELETE")
    finally:
        copy.dispose()
    names = [f"{opening.PACKS}/{name}" for name in packs]
    for snapshot in snapshots:
        inside = sorted((folder / opening.SNAPSHOTS / snapshot).iterdir())
        names += [f"{opening.SNAPSHOTS}/{snapshot}/{file.name}" for file in inside]
    files: Files = {}
    with bar("journal", len(names)) as progress:
        for name in names:
            old = None if previous is None else previous / name
            files[f"{JOURNAL}/{name}"] = copied(folder / name, target / name, old)
            progress.advance(progress.task_ids[0])
            renew()
    for empty in (opening.PACKS, opening.SNAPSHOTS):
        (target / empty).mkdir(exist_ok=True, mode=0o700)
    (target / opening.EPOCH).write_text(epoch)
    shutil.copyfile(folder / opening.MARKER, target / opening.MARKER)
    for file in (database, target / opening.EPOCH, target / opening.MARKER):
        files[f"{JOURNAL}/{file.name}"] = described(file)
    return files


def _copied_checkpoints(root: Path, target: Path, renew: Callable[[], None]) -> Files:
    """Copy checkpoints, notes of runs and sessions, and secrets; what is deleted is left out."""
    root = root.expanduser().resolve()
    target.mkdir(mode=0o700)
    files: Files = {}
    if not root.is_dir():
        return files
    places = list(_units(root))
    with bar("checkpoints", len(places)) as progress:
        for place in places:
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                files |= _copied_unit(root, place, target)
            progress.advance(progress.task_ids[0])
            renew()
    return files


def _units(root: Path) -> Iterator[Path]:
    """Yield checkpoints as folders, and all other files alone."""
    for path in sorted(root.iterdir()):
        if path.name.endswith(PASSING):
            continue
        if path.is_file() or (path / SPEC_FILE).is_file():
            yield path
        else:
            yield from _units(path)


def _copied_unit(root: Path, place: Path, target: Path) -> Files:
    """Copy a file, or a checkpoint as it is at one time. Raises FileNotFoundError."""
    while True:
        inside = [place] if place.is_file() else sorted(place.iterdir())
        before = _version(place)
        made: Files = {}
        try:
            for file in inside:
                if not file.name.endswith(PASSING):
                    name = file.relative_to(root)
                    made[f"{CHECKPOINTS}/{name}"] = copied(file, target / name)
        except FileNotFoundError:
            _remove(target / place.relative_to(root))
            if not place.exists():
                raise
            continue
        if place.is_file() or _version(place) == before:
            return made
        _remove(target / place.relative_to(root))  # it was saved again meanwhile


def _version(checkpoint: Path) -> tuple[Any, ...]:
    """Return what differs between two saves of a checkpoint under one name."""
    if checkpoint.is_file():
        return ()
    marks = [checkpoint / name for name in (SAVED_BY, SPEC_FILE)]
    return tuple(mark.stat().st_mtime_ns if mark.exists() else None for mark in marks)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def restore(source: Path, config: Path, overrides: Sequence[str]) -> None:
    """Put a backup in the places that a config names, which must be empty. Raises ConfigError."""
    wanted = load(config, overrides)
    files, about = read_manifest(source)
    engine, folder = copying.engine_of(wanted.journal)
    places = {JOURNAL: folder, CHECKPOINTS: wanted.checkpoint_dir.expanduser().resolve()}
    for place in places.values():
        if place.exists() and any(place.iterdir()):
            raise ConfigError(f"{place} is not empty; restore into empty folders")
    if found := list(faults(source, files)):
        raise ConfigError(f"the backup is damaged: {'; '.join(found[:3])}")
    is_remote = wanted.journal.url is not None
    with bar("files", len(files)) as progress:
        for name in files:
            part, _, rest = name.partition("/")
            if not (is_remote and rest == opening.DATABASE):
                copied(source / name, places[part] / rest)
            progress.advance(progress.task_ids[0])
    for empty in (opening.PACKS, opening.SNAPSHOTS):
        (folder / empty).mkdir(exist_ok=True, mode=0o700)
    try:
        if is_remote:
            copy = opening.connect_unchanged(source / JOURNAL / opening.DATABASE)
            copying.copy_rows(copy, engine, lambda _: None)
            copy.dispose()
    finally:
        engine.dispose()
    command = " ".join(["skyrl-actors serve", str(config), *overrides])
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(about["made_at"]))
    console.print(
        f"restored {about['service']} as it was at {made} to {folder} and "
        f"{places[CHECKPOINTS]}; start it with `{command}`"
    )


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
            problems = _checked(engine, folder, wanted.checkpoint_dir)
        what = "all that the journal names, and the checkpoints"
    for problem in problems[:SHOWN_FAULTS]:
        console.print(f"[red]{problem}[/red]")
    if len(problems) > SHOWN_FAULTS:
        console.print(f"and {len(problems) - SHOWN_FAULTS} more")
    console.print(f"{what}: {'whole' if not problems else f'{len(problems)} faults'}")
    return not problems


def _checked(engine: Any, folder: Path, checkpoints: Path) -> list[str]:
    """Return the faults of a journal and of checkpoints."""
    try:
        with bar("records", None) as progress:
            task = progress.task_ids[0]
            found = list(
                copying.faults(engine, folder, lambda n: progress.update(task, completed=n))
            )
    finally:
        engine.dispose()
    folders = CheckpointFolders(checkpoints)
    for run in folders.runs():
        for checkpoint in run.checkpoints:
            found += _of_checkpoint(folders, checkpoint.path)
    return found


def _of_checkpoint(folders: CheckpointFolders, path: str) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    from skyrl_actors.messages.paths import parse_path

    where = parse_path(path)
    try:
        folders.spec(where)
        for file in folders.existing(where).glob("*.safetensors"):
            with safe_open(file, "numpy"):  # reads the header, and compares it with the size
                pass
    except (SkyrlActorsError, SafetensorError, OSError) as error:
        yield f"checkpoint {path}: {error}"
