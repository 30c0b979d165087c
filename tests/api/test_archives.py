"""Archives: what a tar holds, and which links are followed."""

import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from skyrl_actors.api import archives
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.paths import TinkerPath

PATH = TinkerPath("s:train:0", "weights", "a")


def test_the_tar_is_the_folder(tmp_path: Path):
    folder = tmp_path / "step-5"
    folder.mkdir()
    contents = {"empty": b"", "small.json": b"{}", "block": bytes(512), "large": os.urandom(3 * 2**20 + 17)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    with tarfile.open(fileobj=io.BytesIO(b"".join(archives.tar(folder)))) as members:
        found = {member.name: members.extractfile(member) for member in members}
        assert {name: file.read() for name, file in found.items() if file} == {f"step-5/{k}": v for k, v in contents.items()}


def test_a_file_that_became_shorter_is_an_error_and_no_whole_archive(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(3 * 2**20))
    parts = archives.tar(tmp_path)
    next(parts), next(parts)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(OSError, match="became shorter"):
        list(parts)


def test_links_are_signed_and_end(tmp_path: Path):
    secret, soon = archives.secret_of(tmp_path), int(time.time()) + 60
    assert archives.secret_of(tmp_path) == secret and (tmp_path / archives.SECRET_FILE).stat().st_mode & 0o077 == 0
    assert [file.name for file in tmp_path.iterdir()] == [archives.SECRET_FILE]
    archives.check(secret, PATH, soon, archives.signature(secret, PATH, soon))
    for path, expires, signed in (
        (TinkerPath("s:train:1", "weights", "a"), soon, archives.signature(secret, PATH, soon)),
        (PATH, soon + 1, archives.signature(secret, PATH, soon)),
        (PATH, soon, archives.signature(b"another", PATH, soon)),
    ):
        with pytest.raises(InvalidRequest, match="was not given out"):
            archives.check(secret, path, expires, signed)
    past = int(time.time()) - 1
    with pytest.raises(InvalidRequest, match="has ended"):
        archives.check(secret, PATH, past, archives.signature(secret, PATH, past))
