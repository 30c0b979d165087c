"""Keep a second copy of a journal's files in remote storage (`journal.mirror`).

A pack is copied before the rows that refer to it are committed, and a snapshot before its row. With
the database elsewhere (`journal.url`), the journal then outlives this machine: an empty folder is
filled from the mirror, file by file when one is needed.
"""

import json
import logging
from pathlib import Path

from skyrl_actors.journal import opening
from skyrl_actors.journal.snapshots import MANIFEST
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.files import write_durably
from skyrl_actors.storage.objects import Objects

log = logging.getLogger(__name__)


def mirror_of(url: str | None) -> Objects | None:
    """Return the mirror at this URL. Raises ConfigError for one that cannot be used."""
    return None if url is None else Objects(url)


def prepare(folder: Path, mirror: Objects) -> None:
    """Mark an empty folder as the mirrored journal. Raises ConfigError if it is another one."""
    there = mirror.get(opening.MARKER)
    if there is None:
        return
    marker = folder / opening.MARKER
    if not marker.exists():
        for name in (opening.PACKS, opening.SNAPSHOTS):
            (folder / name).mkdir(exist_ok=True, mode=0o700)
        epoch = mirror.get(opening.EPOCH)
        if epoch is not None:
            write_durably(folder / opening.EPOCH, epoch.decode())
        write_durably(marker, there.decode())
        log.info("the folder %s is filled from %s when files are needed", folder, mirror.url)
    ids = [json.loads(content)["journal_id"] for content in (there, marker.read_bytes())]
    if ids[0] != ids[1]:
        raise ConfigError(
            f"{mirror.url} mirrors journal {ids[0]}, and {folder} is journal {ids[1]}; set another "
            "journal.mirror"
        )


def begin(folder: Path, mirror: Objects, epoch: int) -> None:
    """Note the epoch, and copy what is missing if the epoch before had no mirror."""
    if mirror.get(opening.EPOCH) != str(epoch - 1).encode():
        _copy_missing(folder, mirror)
        mirror.put(opening.MARKER, (folder / opening.MARKER).read_bytes())
    mirror.put(opening.EPOCH, str(epoch).encode())


def _copy_missing(folder: Path, mirror: Objects) -> None:
    there = set(mirror.names(opening.PACKS))
    packs = [p for p in sorted((folder / opening.PACKS).iterdir()) if p.name not in there]
    snapshots = [
        snapshot
        for snapshot in sorted((folder / opening.SNAPSHOTS).iterdir())
        if not mirror.has(f"{opening.SNAPSHOTS}/{snapshot.name}/{MANIFEST}")
    ]
    if packs or snapshots:
        log.info("copying %d packs and %d snapshots", len(packs), len(snapshots))
    for pack in packs:
        mirror.put(f"{opening.PACKS}/{pack.name}", pack.read_bytes())
    for snapshot in snapshots:
        mirror.put_folder(f"{opening.SNAPSHOTS}/{snapshot.name}", snapshot, MANIFEST)
