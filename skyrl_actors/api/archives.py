"""Checkpoints as tar files, streamed: nothing is built on disk, and nothing larger than a block is in memory.

A link to one is signed and ends, because whoever follows it sends no key.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from skyrl_actors.config.cluster import HttpConfig
from skyrl_actors.messages.errors import ConfigError, InvalidRequest
from skyrl_actors.messages.paths import TinkerPath

SECRET_FILE = ".archive_secret"
VALID_S = 900
BLOCK = 2**20
EVERYWHERE = ("0.0.0.0", "::")


def secret_of(root: Path, name: str = SECRET_FILE) -> bytes:
    """Made once for a checkpoint folder, shared by all replicas that see it."""
    file = root / name
    if not file.exists() or not file.stat().st_size:
        root.mkdir(parents=True, exist_ok=True)
        staging = root / f"{name}.{secrets.token_hex(4)}"
        staging.touch(mode=0o600)
        with staging.open("wb") as stream:  # after a power cut it is whole or absent, and never empty
            stream.write(secrets.token_bytes(32))
            stream.flush()
            os.fsync(stream.fileno())
        if file.exists() and not file.stat().st_size:
            file.unlink()
        with suppress(FileExistsError):  # another replica was first
            file.hardlink_to(staging)
        staging.unlink()
    return file.read_bytes()


def signature(secret: bytes, path: TinkerPath, expires: int, file: str = "") -> str:
    """`file`: one of the checkpoint's files; without it, all of them."""
    return hmac.new(secret, f"{path} {expires} {file}".encode(errors="replace"), hashlib.sha256).hexdigest()


def public_url(http: HttpConfig, host: str) -> str:
    """Where clients reach the service, without a slash at the end. `host` is what a request was addressed to: its sender chooses
    it, so it is believed only when it names the sender's own machine, where the end of a tunnel may have another port.
    Raises ConfigError when the address is not known."""
    if http.public_url:
        return http.public_url.rstrip("/")
    if own := _loopback(host):
        return f"http://{own}"
    if http.host in EVERYWHERE:
        raise ConfigError(
            "this service does not know the address that clients reach it at, so it gives out no links; set http.public_url"
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
    """Raises InvalidRequest for a link that was not given out, or has ended."""
    # As bytes: letters beyond ASCII are an error for text.
    if not hmac.compare_digest(signature(secret, path, expires, file).encode(), given.encode(errors="replace")):
        raise InvalidRequest("this link was not given out by the service; ask for the archive again")
    if expires < time.time():
        raise InvalidRequest("this link has ended; ask for the archive again")


def tar(folder: Path) -> Iterator[bytes]:
    """The files of a checkpoint, as the members of a tar in its name."""
    for file in sorted(folder.iterdir()):
        info = tarfile.TarInfo(f"{folder.name}/{file.name}")
        status = file.stat()
        info.size, info.mtime = status.st_size, int(status.st_mtime)
        yield info.tobuf()
        yield from _padded(file, info.size)
    yield b"\0" * 2 * tarfile.BLOCKSIZE


def _padded(file: Path, size: int) -> Iterator[bytes]:
    left = size
    with file.open("rb") as stream:
        while left > 0:
            part = stream.read(min(BLOCK, left))
            if not part:
                raise OSError(f"{file} became shorter while it was read")
            left -= len(part)
            yield part
    yield b"\0" * (-size % tarfile.BLOCKSIZE)
