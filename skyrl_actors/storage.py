"""Files elsewhere, by fsspec: file://, s3://, gs:// and what else is installed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from skyrl_actors.files import PARTIAL, fsync
from skyrl_actors.messages.errors import ConfigError

WHOLE = "WHOLE"  # names the part of a mirrored folder that has all files; written last


def is_url(path: str) -> bool:
    return "://" in path


def reachable(url: str) -> str:
    """Raises ConfigError for a protocol that is not known or whose library is not installed."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(f"{url}: no protocol {protocol}; use file, s3 or gs") from None
    except ImportError as error:
        raise ConfigError(f"{url}: {error}; pip install 'skyrl-actors[{protocol}]'") from None
    return url


def read(url: str) -> bytes:
    """Raises OSError, ConfigError."""
    reachable(url)
    with _said(url), fsspec.open(url, "rb") as file:
        content: Any = file
        return bytes(content.read())


class Mirror:
    """A second place for the folders below `root`, which outlives this machine. Every call may be repeated; raises OSError.

    A folder lies there as <folder>/<part>/<files> and <folder>/WHOLE with the part's name: a new one is whole before the old one goes.
    One writer at a time.
    """

    def __init__(self, root: Path, url: str, marker: str):
        """`marker`: a file that every whole folder has here."""
        self._root = root
        self._url = reachable(url).rstrip("/")
        self._marker = marker

    def put(self, folder: Path) -> None:
        """All files of a folder, as they are now."""
        target = self._at(folder)
        with _said(target) as files:
            old = self._part(files, target)
            part = uuid.uuid4().hex
            _make_folder(files, f"{target}/{part}")
            for file in folder.iterdir():
                if not file.name.startswith("."):
                    files.put_file(str(file), f"{target}/{part}/{file.name}")
            files.pipe_file(f"{target}/{WHOLE}", part.encode())
            if old is not None:
                files.rm(f"{target}/{old}", recursive=True)

    def put_file(self, file: Path) -> None:
        """One file of a folder that is there, or one that lies by itself."""
        folder = self._at(file.parent)
        with _said(folder) as files:
            part = self._part(files, folder)
            _make_folder(files, folder)
            files.put_file(str(file), f"{folder}/{part}/{file.name}" if part else f"{folder}/{file.name}")

    def has(self, folder: Path) -> bool:
        target = self._at(folder)
        with _said(target) as files:
            return self._part(files, target) is not None

    def remove(self, folder: Path) -> None:
        target = self._at(folder)
        with _said(target) as files:
            if files.exists(f"{target}/{WHOLE}"):
                files.rm_file(f"{target}/{WHOLE}")
            if files.exists(target):
                files.rm(target, recursive=True)

    def pull(self, alone: str) -> int:
        """Fetch what is there and not here: whole folders, and files named `alone` that lie by themselves; how many folders."""
        fetched = 0
        with _said(self._url) as files:
            base = _path(self._url)
            there = sorted(str(name) for name in files.find(base)) if files.exists(base) else []
            for name in there:
                own = self._root / PurePosixPath(name).relative_to(base)
                if own.name == alone and not own.exists():
                    _fetch(files, name, own)
                elif own.name == WHOLE and not (own.parent / self._marker).exists():
                    part = f"{name.removesuffix(WHOLE)}{files.cat_file(name).decode()}/"
                    inside = [n for n in there if n.startswith(part)]
                    for each in sorted(inside, key=lambda n: n.endswith(f"/{self._marker}")):
                        _fetch(files, each, own.parent / each.removeprefix(part))
                    fetched += 1
        return fetched

    def _part(self, files: Any, target: str) -> str | None:
        return files.cat_file(f"{target}/{WHOLE}").decode() if files.exists(f"{target}/{WHOLE}") else None

    def _at(self, path: Path) -> str:
        return f"{self._url}/{path.relative_to(self._root).as_posix()}"


def _fetch(files: Any, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")
    files.get_file(name, str(staging))
    fsync(staging)
    os.replace(staging, target)
    fsync(target.parent)


def _make_folder(files: Any, target: str) -> None:
    """Object stores have none; asked for one, they would make the bucket that a name was mistyped in."""
    if isinstance(files, LocalFileSystem):
        files.makedirs(target, exist_ok=True)


def _path(url: str) -> str:
    return str(url_to_fs(url)[1]).rstrip("/")


@contextmanager
def _said(url: str) -> Iterator[Any]:
    """The file system of `url`; what its library raises becomes an OSError that names the place."""
    try:
        files = url_to_fs(url)[0]
        files.invalidate_cache()  # of listings: others write there too
        yield files
    except ConfigError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {str(error)[:300]}") from error
