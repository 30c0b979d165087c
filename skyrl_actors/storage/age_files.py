"""Encrypt files for their readers, in the format of age (age-encryption.org/v1)."""

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import pyrage  # pyright: ignore[reportMissingTypeStubs]

from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.storage.files import PARTIAL, fsync

T = TypeVar("T")
AGE: Any = pyrage  # without types
SUFFIX = ".age"
MOST = 64  # recipients of one file
_RECIPIENTS = (AGE.x25519.Recipient, AGE.ssh.Recipient)


def recipients_of(texts: Sequence[str]) -> list[Any]:
    """Read public keys: age1…, or those of SSH. Raises InvalidRequest and counts from 0."""
    if len(texts) > MOST:
        raise InvalidRequest(f"age_encryption_recipients has {len(texts)} keys; at most {MOST}")
    return [_recipient_of(text, number) for number, text in enumerate(texts)]


def _recipient_of(text: str, number: int) -> Any:
    for kind in _RECIPIENTS:
        try:
            found = kind.from_str(text)
            _called(AGE.encrypt, b"", [found])  # some keys are read, and nothing can be encrypted
        except (AGE.RecipientError, AGE.EncryptError, InternalError):
            continue
        return found
    raise InvalidRequest(  # without the text, which may be a secret key
        f"age_encryption_recipients[{number}] is not a public key of age (age1…) or of SSH "
        "(ssh-ed25519 or ssh-rsa)"
    )


def encrypt(files: Iterable[Path], texts: Sequence[str]) -> None:
    """Replace each file by its encryption, which has the suffix .age.

    May be repeated: what is encrypted already stays. Raises OSError.
    """
    recipients = recipients_of(texts)
    for file in files:
        if file.suffix == SUFFIX:
            continue
        staging = file.with_name(f".{uuid.uuid4().hex}{PARTIAL}")
        try:
            _encrypted(file, staging, recipients)
            staging.replace(file.with_name(file.name + SUFFIX))
        except (OSError, InternalError):
            staging.unlink(missing_ok=True)
            raise
        file.unlink()
        fsync(file.parent)


def _called(function: Callable[..., T], *arguments: Any) -> T:
    """Call pyrage. A panic of it, which is no Exception, becomes InternalError."""
    try:
        return function(*arguments)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  its class has no name
        raise InternalError(f"pyrage failed: {error}") from None


class _Target:
    """A file that keeps the first error of a write. pyrage drops that of its last one."""

    def __init__(self, stream: FileIO):
        self._stream = stream
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self._stream.write(content)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        pass  # nothing is buffered


def _encrypted(file: Path, staging: Path, recipients: list[Any]) -> None:
    with file.open("rb") as source, staging.open("wb", buffering=0) as stream:
        target = _Target(stream)
        try:
            _called(AGE.encrypt_io, source, target, recipients)
        except AGE.EncryptError as error:
            raise target.error or OSError(f"{file.name} cannot be encrypted: {error}") from None
        if target.error is not None:
            raise target.error
        os.fsync(stream.fileno())
