"""Compiled programs on disk. A later start loads them without tracing and without compiling.

A file belongs to one process of one kind of machine: its name is a digest of all that the program
depends on, the source of this package included. Loading a file runs its content, so the folder is
its owner's alone.
"""

import hashlib
import logging
import os
import pickle
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from skyrl_actors.storage.private_folders import private_folder

log = logging.getLogger(__name__)
SUFFIX = ".executable"
DIGEST_BYTES = hashlib.sha256().digest_size  # at the start of a file
KEPT_DAYS = 30  # since the last use
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")  # that XLA reads


class Made(NamedTuple):
    """A program, and how it was made."""

    program: Callable[..., Any]
    was_read: bool  # from its file
    seconds: float


class ExecutableFiles:
    """The programs of a rank in a folder; without one, nothing is kept.

    `about` is what all of these programs depend on.
    """

    def __init__(self, folder: Path | None, *about: Any):
        self._root = folder
        self._folder = folder and private_folder(folder / "executables")
        self._about = about
        self._delete_old()

    def also(self, *about: Any) -> "ExecutableFiles":
        """Return the files of programs in the same folder that depend on more."""
        return ExecutableFiles(self._root, *self._about, *about)

    def path(self, *key: Any) -> Path | None:
        """Return the file of the program with this key."""
        if self._folder is None:
            return None
        text = repr((_platform(), *self._about, *key))
        return self._folder / (hashlib.sha256(text.encode()).hexdigest() + SUFFIX)

    def program(self, compile_it: Callable[[], Any], *key: Any) -> Made:
        """Return a program from its file, or compile it and write the file."""
        began, path = time.perf_counter(), self.path(*key)
        found = self.read(path)
        made = found or compile_it()
        if found is None:
            self.write(path, made)
        return Made(made, found is not None, time.perf_counter() - began)

    def read(self, path: Path | None) -> Callable[..., Any] | None:
        """Return the program of a file; None if there is none that can be loaded."""
        if path is None:
            return None
        try:
            stored = path.read_bytes()
            os.utime(path)  # another process deletes what was not used for long
        except FileNotFoundError:
            return None
        digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:  # for example after a power cut
            log.warning("the program %s is damaged, and is compiled again", path)
            return None
        try:
            found: Any = serialize_executable.deserialize_and_load(*pickle.loads(content))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            log.warning("cannot load the program %s, which is compiled again: %s", path, error)
            return None
        return found

    def write(self, path: Path | None, program: Any) -> None:
        """Write a program. Another process may write the same file at the same time."""
        if path is None:
            return
        try:
            content = pickle.dumps(serialize_executable.serialize(program))
            made = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
            made.write_bytes(hashlib.sha256(content).digest() + content)
            made.replace(path)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            log.warning("a program is not kept for the next start: %s", error)

    def _delete_old(self) -> None:
        oldest = time.time() - KEPT_DAYS * 24 * 3600
        for path in self._folder.iterdir() if self._folder else ():
            try:
                if path.stat().st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process deleted it


@cache
def _platform() -> tuple[Any, ...]:
    """Return what the code of a program depends on beside its inputs."""
    device = jax.local_devices()[0]
    return (
        jax.__version__,
        jaxlib.version.__version__,
        device.platform,
        device.device_kind,
        device.client.platform_version,
        jax.process_index(),
        [os.environ.get(name) for name in VARIABLES],
        _instructions() if device.platform == "cpu" else "",
        _source(),
    )


def _instructions() -> str:
    """Return the instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _source() -> str:
    """Return a digest of this package's source."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def form_of(tree: Any) -> str:
    """Return the structure, shapes and types of arguments, as a part of a key."""
    leaves, structure = jax.tree.flatten(tree)
    return f"{structure} {[(each.shape, str(each.dtype)) for each in leaves]}"
