"""Encryption of exports: repeated after a crash, and with keys of several kinds."""

from pathlib import Path

import pyrage
import pytest

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.storage import age_files

ONE, TWO = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
BOTH = [str(ONE.to_public()), str(TWO.to_public())]


def test_every_recipient_reads_the_files_and_a_repeat_changes_nothing(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 100_000)
    age_files.encrypt([tmp_path / "a"], BOTH)  # a crash came before b
    first = (tmp_path / "a.age").read_bytes()
    age_files.encrypt(sorted(tmp_path.iterdir()), BOTH)
    assert {file.name for file in tmp_path.iterdir()} == {"a.age", "b.age"}
    assert (tmp_path / "a.age").read_bytes() == first
    for identity in (ONE, TWO):
        assert pyrage.decrypt((tmp_path / "b.age").read_bytes(), [identity]) == b"b" * 100_000


def test_a_file_that_cannot_be_read_leaves_nothing_half_written(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        age_files.encrypt([tmp_path / "missing"], BOTH)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["", "age1", "AGE-SECRET-KEY-1", "ssh-dss AAAA", str(ONE)])
def test_what_is_no_public_key_is_refused(wrong: str):
    with pytest.raises(InvalidRequest, match=r"recipients\[1\] is not a public key") as raised:
        age_files.recipients_of([BOTH[0], wrong])
    assert len(wrong) < 8 or wrong not in str(raised.value), "it may be a secret"
