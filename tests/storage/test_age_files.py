"""Encryption of exports: repeated after a crash, and with keys of several kinds."""

import errno
import subprocess
import sys
from pathlib import Path

import pyrage
import pytest

from skyrl_actors.messages.errors import InternalError, InvalidRequest
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


def test_a_disk_that_fills_loses_nothing(tmp_path: Path):
    """The plain file stays, and nothing else."""
    plain = tmp_path / "a"
    # Of the content, in pieces of 64 KiB with a tag each; a header of random length (some 300
    # bytes) comes before. With `content` as the limit only the last piece does not fit. It is
    # smaller than pyrage's buffer, so pyrage drops the error of its write.
    content = 200_000 + 4 * 16 + 16
    for limit in (content, content - 3_000, 130_000, 1):
        plain.write_bytes(b"x" * 200_000)
        code = (
            "import resource, signal, sys; from pathlib import Path\n"
            "from skyrl_actors.storage import age_files\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
            "try:\n    age_files.encrypt([Path(sys.argv[2])], sys.argv[3:])\n"
            "except OSError as error:\n    print(error.errno)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(limit), str(plain), *BOTH],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{errno.EFBIG}\n", limit
        assert [file.name for file in tmp_path.iterdir()] == ["a"], limit


@pytest.mark.parametrize("wrong", ["", "age1", "AGE-SECRET-KEY-1", "ssh-dss AAAA", "a secret key"])
def test_what_is_no_public_key_is_refused(wrong: str):
    if wrong == "a secret key":
        wrong = str(ONE)
    with pytest.raises(InvalidRequest, match=r"recipients\[1\] is not a public key") as raised:
        age_files.recipients_of([BOTH[0], wrong])
    assert len(wrong) < 8 or wrong not in str(raised.value), "it may be a secret"


def test_a_key_that_encrypts_nothing_is_refused(tmp_path: Path):
    """The point of this key has a low order, at which the library panics."""
    bad = "age1" + "q" * 52 + "5cu47z"
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=r"age_encryption_recipients\[1\]"):
        age_files.recipients_of([BOTH[0], bad])
    with pytest.raises(InvalidRequest):
        age_files.encrypt([tmp_path / "a"], [bad])


def test_a_panic_while_a_file_is_encrypted_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Panic(BaseException):
        pass

    def fails(*_: object) -> None:
        raise Panic("at the disco")

    (tmp_path / "a").write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(age_files.AGE, "encrypt_io", fails)
        with pytest.raises(InternalError, match="pyrage failed: at the disco"):
            age_files.encrypt([tmp_path / "a"], BOTH)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
