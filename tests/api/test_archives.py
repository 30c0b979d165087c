"""Archives: the content of a tar, and the checks of its links."""

import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from skyrl_actors.api import archives
from skyrl_actors.config.cluster import HttpConfig
from skyrl_actors.messages.errors import ConfigError, InvalidRequest, Unavailable
from skyrl_actors.messages.paths import TinkerPath

PATH = TinkerPath("s:train:0", "weights", "a")


def test_the_tar_contains_the_files_of_the_folder(tmp_path: Path):
    folder = tmp_path / "step-5"
    folder.mkdir()
    contents = {
        "empty": b"",
        "small.json": b"{}",
        "block": bytes(512),
        "large": os.urandom(3 * 2**20 + 17),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    # For the service: other tenants may download a published checkpoint.
    (folder / "about.json").write_text('{"copied_from": "tinker://someone/weights/secret"}')
    (folder / "saved_by").write_text("r1")
    content = b"".join(archives.Members(folder).tar())
    with tarfile.open(fileobj=io.BytesIO(content)) as members:
        found = {member.name: members.extractfile(member) for member in members}
        assert {name: file.read() for name, file in found.items() if file} == contents


def test_a_file_that_shrinks_during_the_download_is_an_error(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(3 * 2**20))
    parts = archives.Members(tmp_path).tar()
    next(parts)
    next(parts)
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(OSError, match="became shorter"):
        list(parts)


def test_a_tar_has_the_files_of_one_save(tmp_path: Path):
    """It is saved again while its files are opened, and while they are read."""
    folder, saves = tmp_path / "last", [0]

    def save() -> None:
        saves[0] += 1
        staging = tmp_path / f"new{saves[0]}"
        staging.mkdir()
        for name in ("a", "b"):
            (staging / name).write_text(f"{name}{saves[0]}" * 100_000)
        if folder.exists():
            folder.rename(tmp_path / f"old{saves[0]}")
        staging.rename(folder)

    save()
    asked = list[int]()

    def version() -> str:
        asked.append(saves[0])
        if len(asked) == 2:
            save()
        return str(saves[0])

    parts = archives.opened(folder, version).tar()
    content = next(parts)
    save()
    content += b"".join(parts)
    with tarfile.open(fileobj=io.BytesIO(content)) as members:
        texts = {m.name: members.extractfile(m) for m in members}
        assert {n: f.read(2) for n, f in texts.items() if f} == {"a": b"a2", "b": b"b2"}
    with pytest.raises(Unavailable, match="is being saved again"):
        archives.opened(folder, lambda: (save(), str(saves[0]))[1])


def test_links_are_signed_and_expire(tmp_path: Path):
    secret, soon = archives.secret_of(tmp_path), int(time.time()) + 60
    assert (
        archives.secret_of(tmp_path) == secret
        and (tmp_path / archives.SECRET_FILE).stat().st_mode & 0o077 == 0
    )
    assert [file.name for file in tmp_path.iterdir()] == [archives.SECRET_FILE]
    archives.check(secret, PATH, soon, archives.signature(secret, PATH, soon))
    for path, expires, signed in (
        (TinkerPath("s:train:1", "weights", "a"), soon, archives.signature(secret, PATH, soon)),
        (PATH, soon + 1, archives.signature(secret, PATH, soon)),
        (PATH, soon, archives.signature(b"another", PATH, soon)),
    ):
        with pytest.raises(InvalidRequest, match="was not created by this service"):
            archives.check(secret, path, expires, signed)
    past = int(time.time()) - 1
    with pytest.raises(InvalidRequest, match="has expired"):
        archives.check(secret, PATH, past, archives.signature(secret, PATH, past))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1@evil.example",
        "localhost.evil.example",
        "a b",
        "[::1",
        "",
        "127.0.0.1:x",
    ],
)
def test_links_do_not_use_the_host_header_of_a_request(host: str):
    assert archives.public_url(HttpConfig(), host) == "http://127.0.0.1:8000"
    assert (
        archives.public_url(HttpConfig(host="10.0.0.5", api_keys=("tml-0123456789",)), host)
        == "http://10.0.0.5:8000"
    )
    with pytest.raises(ConfigError, match=r"set http\.public_url"):
        archives.public_url(HttpConfig(host="0.0.0.0", api_keys=("tml-0123456789",)), host)
    named = HttpConfig(
        host="0.0.0.0", api_keys=("tml-0123456789",), public_url="https://rl.example.com/"
    )
    assert archives.public_url(named, host) == "https://rl.example.com"


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "[::1]:9000", "127.0.0.1"])
def test_a_loopback_host_header_is_used_in_links(host: str):
    assert archives.public_url(HttpConfig(), host) == f"http://{host}"


@pytest.mark.parametrize(
    "url", ["ftp://a", "rl.example.com", "https://", "https://a?b", "https://a b", "https://a@b"]
)
def test_an_invalid_public_url_is_refused(url: str):
    with pytest.raises(ValueError, match="public_url"):
        HttpConfig(public_url=url)
