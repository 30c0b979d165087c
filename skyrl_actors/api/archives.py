"""Checkpoints as tar files, streamed: nothing is built on disk, and nothing larger than a block is in memory.

A link to one is signed and ends, because whoever follows it sends no key.
"""

import hashlib
import hmac
import os
import secrets
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.paths import TinkerPath

SECRET_FILE = ".archive_secret"
VALID_S = 900
BLOCK = 2**20


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
    return hmac.new(secret, f"{path} {expires} {file}".encode(), hashlib.sha256).hexdigest()


def check(secret: bytes, path: TinkerPath, expires: int, given: str, file: str = "") -> None:
    """Raises InvalidRequest for a link that was not given out, or has ended."""
    if not hmac.compare_digest(signature(secret, path, expires, file), given):
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
