"""Stream checkpoints as tar files, and sign the links to them.

Nothing is built on disk, and at most one block is in memory. A link is signed and expires, because
its downloads carry no API key.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from skyrl_actors.config.cluster import HttpConfig
from skyrl_actors.controller.checkpoints import NOTES
from skyrl_actors.messages.errors import ConfigError, InvalidRequest, Unavailable
from skyrl_actors.messages.paths import TinkerPath

SECRET_FILE = ".archive_secret"
VALID_S = 900
BLOCK = 2**18
OPENS = 5
EVERYWHERE = ("0.0.0.0", "::")


def secret_of(root: Path, name: str = SECRET_FILE) -> bytes:
    """Return the secret of a checkpoint folder; create it if missing.

    All replicas that see the folder share it.
    """
    file = root / name
    if not file.exists() or not file.stat().st_size:
        root.mkdir(parents=True, exist_ok=True)
        staging = root / f"{name}.{secrets.token_hex(4)}"
        staging.touch(mode=0o600)
        # Synced: after a power cut the file is complete or absent, and never empty.
        with staging.open("wb") as stream:
            stream.write(secrets.token_bytes(32))
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists() and not file.stat().st_size:
            file.unlink()
        with suppress(FileExistsError):  # another replica created it first
            file.hardlink_to(staging)
        staging.unlink()
    return file.read_bytes()


def signature(secret: bytes, path: TinkerPath, expires: int, file: str = "") -> str:
    """Sign a link to one `file` of the checkpoint, or to all of them without `file`."""
    return hmac.new(
        secret, f"{path} {expires} {file}".encode(errors="replace"), hashlib.sha256
    ).hexdigest()


def public_url(http: HttpConfig, host: str) -> str:
    """Return the service's URL for clients, without a slash at the end.

    `host` is the Host header of a request. Its sender chooses it, so it is used only when it is a
    loopback address, where a tunnel may have another port. Raises ConfigError when the URL is not
    known.
    """
    if http.public_url:
        return http.public_url.rstrip("/")
    if own := _loopback(host):
        return f"http://{own}"
    if http.host in EVERYWHERE:
        raise ConfigError(
            f"http.host {http.host} does not tell which address clients use, "
            "so the service creates no links; set http.public_url"
        )
    return f"http://{f'[{http.host}]' if ':' in http.host else http.host}:{http.port}"


def _loopback(host: str) -> str | None:
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname or "", parts.port
        is_own = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return None
    if not is_own:
        return None
    return (f"[{name}]" if ":" in name else name) + (f":{port}" if port else "")


def check(secret: bytes, path: TinkerPath, expires: int, given: str, file: str = "") -> None:
    """Check a link's signature. Raises InvalidRequest for a wrong or expired one."""
    # Compared as bytes: compare_digest refuses text beyond ASCII.
    if not hmac.compare_digest(
        signature(secret, path, expires, file).encode(), given.encode(errors="replace")
    ):
        raise InvalidRequest("this link was not created by this service; request the archive again")
    if expires < time.time():
        raise InvalidRequest("this link has expired; request the archive again")


class Members:
    """The files of a checkpoint, opened at one time, so that all are of one save."""

    def __init__(self, folder: Path):
        self._files: list[tuple[tarfile.TarInfo, BinaryIO]] = []
        with ExitStack() as undo:
            for file in sorted(file for file in folder.iterdir() if file.name not in NOTES):
                stream = undo.enter_context(file.open("rb"))
                info, status = tarfile.TarInfo(file.name), os.fstat(stream.fileno())
                info.size, info.mtime = status.st_size, int(status.st_mtime)
                self._files.append((info, stream))
            self._opened = undo.pop_all()

    def close(self) -> None:
        self._opened.close()

    def tar(self) -> Iterator[bytes]:
        """Yield a tar archive, with the files at its top as in hosted Tinker's; then close them.

        Notes are left out: the link may be to a published checkpoint of another tenant.
        """
        with self._opened:
            for info, stream in self._files:
                yield info.tobuf()
                yield from _padded(info, stream)
            yield b"\0" * 2 * tarfile.BLOCKSIZE


def opened(folder: Path, version: Callable[[], str]) -> Members:
    """Open the files of one save, although the checkpoint may be saved again meanwhile.

    `version` returns the present one. Raises Unavailable if it is saved all the time.
    """
    for _ in range(OPENS):
        with ExitStack() as undo, suppress(FileNotFoundError):  # while it is being replaced
            before = version()
            members = Members(folder)
            undo.callback(members.close)
            if version() == before:
                undo.pop_all()
                return members
    raise Unavailable("this checkpoint is being saved again; try again")


def _padded(info: tarfile.TarInfo, stream: BinaryIO) -> Iterator[bytes]:
    left = info.size
    while left > 0:
        part = stream.read(min(BLOCK, left))
        if not part:
            raise OSError(f"{info.name} became shorter while it was read")
        left -= len(part)
        yield part
    yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
