"""Files that never change, in remote storage, with fsspec: file://, s3://, gs:// and others.

Every call may be repeated. All raise OSError.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from skyrl_actors.storage.files import write_durably
from skyrl_actors.storage.mirror import make_folder, reachable, said


class Objects:
    """Files and folders below a URL. A folder is present once its listing is, which comes last."""

    def __init__(self, url: str):
        self.url = reachable(url).rstrip("/")

    def has(self, name: str) -> bool:
        with said(self.url) as files:
            return files.exists(self._at(name))

    def get(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is no such file."""
        with said(self.url) as files:
            try:
                return files.cat_file(self._at(name))
            except FileNotFoundError:
                return None

    def put(self, name: str, content: bytes) -> None:
        with said(self.url) as files:
            make_folder(files, self._at(name).rpartition("/")[0])
            files.pipe_file(self._at(name), content)

    def put_folder(self, name: str, folder: Path, listing: str) -> None:
        """Copy the files of a folder. `listing` is the one that makes it complete."""
        with said(self.url) as files:
            make_folder(files, self._at(name))
            for file in sorted(folder.iterdir(), key=lambda f: f.name == listing):
                files.put_file(str(file), f"{self._at(name)}/{file.name}")

    def get_folder(self, name: str, target: Path, listing: str) -> bool:
        """Fetch a folder with the files of its listing. Return whether it is there."""
        content = self.get(f"{name}/{listing}")
        if content is None:
            return False
        target.mkdir(mode=0o700, exist_ok=True)
        with said(self.url) as files:
            for inside in json.loads(content)["files"]:
                files.get_file(f"{self._at(name)}/{inside}", str(target / inside))
        write_durably(target / listing, content.decode())
        return True

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder."""
        with said(self.url) as files:
            below = files.find(self._at(folder)) if files.exists(self._at(folder)) else []
        prefix = f"{self._at(folder)}/"
        return sorted({path.removeprefix(prefix).partition("/")[0] for path in below})

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders with their files. Those that are not there are left out."""
        with said(self.url) as files:
            for name in names:
                if files.exists(self._at(name)):
                    files.rm(self._at(name), recursive=True)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files, up to a thousand with one request where the storage can."""
        paths: Any = [self._at(name) for name in names]  # fsspec declares only str
        with said(self.url) as files:
            try:
                files.rm(paths)
            except FileNotFoundError:  # those after it are left
                for path in paths:
                    with suppress(FileNotFoundError):
                        files.rm_file(path)

    def _at(self, name: str) -> str:
        return f"{url_to_fs(self.url)[1].rstrip('/')}/{name}"
