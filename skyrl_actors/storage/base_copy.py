"""Bring a base model to a node: find it there, download it from the hub, or write it.

A node gets the model under the path that it has on the controller's node, and in the same revision.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from skyrl_actors.messages.errors import ConfigError

LOOK_S = 2.0
SNAPSHOTS = "snapshots"  # of the hub's cache: models--a--b/snapshots/<revision>/<file>


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCopy:
    """A base model that a node needs."""

    folder: str
    sizes: Mapping[str, int]  # bytes by name of a file below the folder
    hub_name: str | None = None  # where it can be downloaded from
    contents: Mapping[str, bytes] | None = None  # of a model that exists nowhere else

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Arrived:
    """How much of a download a node has."""

    num_bytes: int
    total_bytes: int


def described(folder: Path, hub_name: str | None, is_made_here: bool) -> BaseCopy:
    """Describe a base model on this node. `is_made_here` models are sent with their contents."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    names = {str(file.relative_to(folder)): file for file in files}
    return BaseCopy(
        folder=str(folder),
        sizes={name: file.stat().st_size for name, file in names.items()},
        hub_name=hub_name if folder.parent.name == SNAPSHOTS else None,
        contents={name: file.read_bytes() for name, file in names.items()}
        if is_made_here
        else None,
    )


def bring(copy: BaseCopy, node: str) -> Iterator[Arrived]:
    """Make the model complete on this node. Yield every LOOK_S seconds while it is downloaded.

    Raises ConfigError if it is incomplete here and cannot be had.
    """
    absent = _absent(copy)
    if not absent:
        return
    if copy.contents is not None:
        _write(copy)
    elif copy.hub_name is not None:
        yield from _downloaded(copy, copy.hub_name, node)
    else:
        raise ConfigError(
            f"base_model.path {copy.folder}: {absent[0]} is not on node {node} "
            f"({len(absent)} of {len(copy.sizes)} files differ); put the folder on storage that "
            "all nodes share, copy it to this path on every node, or set base_model.name so that "
            "each node downloads it"
        )
    if absent := _absent(copy):
        raise ConfigError(f"{copy.folder}: {absent[0]} did not arrive on node {node}")


def _absent(copy: BaseCopy) -> list[str]:
    """Return the files that are missing on this node, or have another size."""
    folder = Path(copy.folder)
    return [
        name
        for name, size in copy.sizes.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]


def _write(copy: BaseCopy) -> None:
    assert copy.contents is not None
    for name, content in copy.contents.items():
        target = Path(copy.folder) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, target)


def _downloaded(copy: BaseCopy, name: str, node: str) -> Iterator[Arrived]:
    import huggingface_hub

    hub, folder = cast(Any, huggingface_hub), Path(copy.folder)
    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(
            hub.snapshot_download,
            name,
            revision=folder.name,
            cache_dir=folder.parents[2],
            allow_patterns=list(copy.sizes),
        )
        while wait([download], LOOK_S).not_done:
            yield Arrived(_size_of(folder.parents[1] / "blobs"), copy.num_bytes)
    if error := download.exception():
        raise ConfigError(
            f"base_model.name {name!r} cannot be downloaded on node {node} to {folder} "
            f"({type(error).__name__}: {error}); give the node access to the hub, or put "
            "HF_HOME on storage that all nodes share"
        ) from error
    yield Arrived(_size_of(folder.parents[1] / "blobs"), copy.num_bytes)


def _size_of(blobs: Path) -> int:
    """Return the bytes in the hub's cache, with those of unfinished files."""
    found = 0
    for file in blobs.glob("*"):
        try:
            found += file.stat().st_size
        except FileNotFoundError:  # renamed because it is complete
            continue
    return found
