"""Copy files to remote storage with fsspec: file://, s3://, gs:// and other installed ones."""

import os
import uuid
from bisect import bisect_left
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.storage.files import PARTIAL, fsync

LAST = "\U0010ffff"  # sorts after all characters of names
REACHED = ".reached"
WHOLE = "WHOLE"  # a file with the name of the complete part of a folder; written last


def is_url(path: str) -> bool:
    """Return whether this is a URL for fsspec, and not a local path."""
    return "://" in path


def reachable(url: str) -> str:
    """Return the URL. Raises ConfigError for an unknown protocol or a missing library."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(
            f"{url}: the protocol {protocol} is not known; use file, s3 or gs"
        ) from None
    except ImportError as error:
        raise ConfigError(f"{url}: {error}; pip install 'skyrl-actors[{protocol}]'") from None
    return url


def read(url: str) -> bytes:
    """Read a file. Raises OSError or ConfigError."""
    reachable(url)
    with said(url), fsspec.open(url, "rb") as file:
        return file.read()


class Mirror:
    """A copy of the folders below `root` that outlives this machine.

    Every call may be repeated. All raise OSError. A folder is stored as <folder>/<part>/<files>,
    and <folder>/WHOLE has the part's name. So a new part is complete before the old one is deleted.
    Only one process may write at a time.
    """

    def __init__(self, root: Path, url: str, marker: str):
        """`marker`: a file that every complete local folder contains."""
        self._root = root
        self._url = reachable(url).rstrip("/")
        self._marker = marker

    def put(self, folder: Path) -> None:
        """Copy all present files of a folder."""
        target = self._at(folder)
        with said(target) as files:
            old = self._part(files, target)
            part = uuid.uuid4().hex
            make_folder(files, f"{target}/{part}")
            for file in folder.iterdir():
                if not file.name.startswith("."):
                    files.put_file(str(file), f"{target}/{part}/{file.name}")
            files.pipe_file(f"{target}/{WHOLE}", part.encode())
            if old is not None:
                files.rm(f"{target}/{old}", recursive=True)

    def put_file(self, file: Path) -> None:
        """Copy one file of a mirrored folder, or a file without a folder."""
        folder = self._at(file.parent)
        with said(folder) as files:
            part = self._part(files, folder)
            make_folder(files, folder)
            files.put_file(
                str(file), f"{folder}/{part}/{file.name}" if part else f"{folder}/{file.name}"
            )

    def remove(self, folder: Path) -> None:
        """Remove the copy of a folder."""
        target = self._at(folder)
        with said(target) as files:
            if files.exists(f"{target}/{WHOLE}"):
                files.rm_file(f"{target}/{WHOLE}")
            if files.exists(target):
                files.rm(target, recursive=True)

    def reach(self) -> None:
        """Write a file, which proves that the storage is there and can be written."""
        with said(self._url) as files:
            make_folder(files, self._url)
            files.pipe_file(f"{self._url}/{REACHED}", b"")

    def whole(self, wanted: Callable[[str], bool]) -> set[Path]:
        """Return the folders that the mirror has whole, below a folder whose name is `wanted`."""
        with said(self._url) as files:
            base = _path(self._url)
            places = (PurePosixPath(name).relative_to(base) for name in _files(files, base))
            return {
                self._root / place.parent
                for place in places
                if place.name == WHOLE and wanted(place.parts[0])
            }

    def pull_file(self, file: Path) -> None:
        """Fetch a file without a folder that is missing here, if the mirror has it."""
        with said(self._at(file)) as files:
            if not file.exists() and files.exists(self._at(file)):
                _fetch(files, self._at(file), file)

    def pull(
        self, alone: str, wanted: Callable[[str], bool], below: str = ""
    ) -> tuple[int, set[Path]]:
        """Fetch complete folders and files named `alone` that are missing here.

        Only those below a folder whose name is `wanted`; `below` is its name if it is one alone.
        Returns the number of folders that were fetched, and all that the mirror has whole. It asks
        the storage once, and for each that is fetched.
        """
        fetched, whole = 0, set[Path]()
        with said(self._url) as files:
            base = _path(self._url)
            there = sorted(_files(files, f"{base}/{below}".rstrip("/")))
            for name in there:
                place = PurePosixPath(name).relative_to(base)
                own = self._root / place
                if not wanted(place.parts[0]):
                    continue
                if own.name == alone and not own.exists():
                    _fetch(files, name, own)
                elif own.name == WHOLE:
                    whole.add(own.parent)
                    if (own.parent / self._marker).exists():
                        continue
                    part = f"{name.removesuffix(WHOLE)}{files.cat_file(name).decode()}/"
                    first, end = (bisect_left(there, f"{part}{z}") for z in ("", LAST))
                    inside = there[first:end]
                    for each in sorted(inside, key=lambda n: n.endswith(f"/{self._marker}")):
                        _fetch(files, each, own.parent / each.removeprefix(part))
                    fetched += 1
        return fetched, whole

    def _part(self, files: fsspec.AbstractFileSystem, target: str) -> str | None:
        return (
            files.cat_file(f"{target}/{WHOLE}").decode()
            if files.exists(f"{target}/{WHOLE}")
            else None
        )

    def _at(self, path: Path) -> str:
        return f"{self._url}/{path.relative_to(self._root).as_posix()}"


def _files(files: fsspec.AbstractFileSystem, base: str) -> list[str]:
    return files.find(base) if files.exists(base) else []


def _fetch(files: fsspec.AbstractFileSystem, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")
    files.get_file(name, str(staging))
    fsync(staging)
    os.replace(staging, target)
    fsync(target.parent)


def make_folder(files: fsspec.AbstractFileSystem, target: str) -> None:
    """Create a local folder.

    Object stores have no folders, and would create a bucket, for example one with a mistyped name.
    """
    if isinstance(files, LocalFileSystem):
        files.makedirs(target, exist_ok=True)


def _path(url: str) -> str:
    return url_to_fs(url)[1].rstrip("/")


@contextmanager
def said(url: str) -> Generator[fsspec.AbstractFileSystem]:
    """Yield the file system of `url`. Errors of its library become OSError with the URL."""
    try:
        files = url_to_fs(url)[0]
        files.invalidate_cache()  # of listings: other processes write there too
        yield files
    except ConfigError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {str(error)[:300]}") from error
