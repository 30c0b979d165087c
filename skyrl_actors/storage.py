"""Files elsewhere, by fsspec: file://, s3://, gs:// and what else is installed."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from skyrl_actors.messages.errors import ConfigError


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

    `marker` is the file that makes a folder whole: written last, removed first.
    """

    def __init__(self, root: Path, url: str, marker: str):
        self._root = root
        self._url = reachable(url).rstrip("/")
        self._marker = marker

    def put(self, folder: Path) -> None:
        """All files of a folder, as they are now."""
        target = self._at(folder)
        with _said(target) as files:
            self._forget(files, target)
            _make_folder(files, target)
            names = sorted(
                (file for file in folder.iterdir() if not file.name.startswith(".")), key=lambda f: f.name == self._marker
            )
            for file in names:
                files.put_file(str(file), f"{target}/{file.name}")

    def put_file(self, file: Path) -> None:
        target = self._at(file)
        with _said(target) as files:
            _make_folder(files, target.rpartition("/")[0])
            files.put_file(str(file), target)

    def remove(self, folder: Path) -> None:
        target = self._at(folder)
        with _said(target) as files:
            self._forget(files, target)
            if files.exists(target):
                files.rm(target, recursive=True)

    def pull(self, alone: Iterable[str]) -> int:
        """Fetch what is there and not here: whole folders, and files named `alone` that lie beside them; how many folders."""
        fetched = 0
        with _said(self._url) as files:
            base = _path(self._url)
            there = sorted(str(name) for name in files.find(base)) if files.exists(base) else []
            for name in there:
                own = PurePosixPath(name).relative_to(base)
                if own.name == self._marker and not (self._root / own).exists():
                    self._fetch(files, [n for n in there if n.startswith(f"{name.rpartition('/')[0]}/")], base)
                    fetched += 1
                elif own.name in alone and not (self._root / own).exists():
                    self._fetch(files, [name], base)
        return fetched

    def _fetch(self, files: Any, names: list[str], base: str) -> None:
        for name in sorted(names, key=lambda n: n.endswith(f"/{self._marker}")):
            target = self._root / PurePosixPath(name).relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            staging = target.with_name(f".{target.name}.partial")
            files.get_file(name, str(staging))
            os.replace(staging, target)

    def _forget(self, files: Any, target: str) -> None:
        if files.exists(f"{target}/{self._marker}"):
            files.rm_file(f"{target}/{self._marker}")

    def _at(self, path: Path) -> str:
        return f"{self._url}/{path.relative_to(self._root).as_posix()}"


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
        yield url_to_fs(url)[0]
    except ConfigError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {str(error)[:300]}") from error
