"""Encrypt files for their readers, in the format of age (age-encryption.org/v1)."""

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyrage  # pyright: ignore[reportMissingTypeStubs]

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.storage.files import PARTIAL, fsync

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
            return kind.from_str(text)
        except AGE.RecipientError:
            continue
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
            AGE.encrypt_file(str(file), str(staging), recipients)
            fsync(staging)
            staging.replace(file.with_name(file.name + SUFFIX))
        except OSError:
            staging.unlink(missing_ok=True)
            raise
        file.unlink()
        fsync(file.parent)
