"""Buckets of weights that one process of a host receives for all processes of that host.

The first worker of each host takes part in a broadcast. It receives each bucket into one of two
halves of shared memory, and the other workers of the host copy it from there. The network then
carries the weights once for each host and not once for each engine.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[reportPrivateImportUsage]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOOK_S = 0.5  # how often a worker that waits looks who has died


def host_id() -> str:
    """Return a text that is equal for processes that can open each other's memory.

    They run on one machine, in one namespace of processes, as one user.
    """
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return f"{socket.gethostname()} {uuid.uuid4().hex}"


def first_of_each(hosts: Mapping[int, str]) -> list[int]:
    """Return the first rank of each host, in the order of ranks."""
    first: dict[str, int] = {}
    for rank in sorted(hosts):
        first.setdefault(hosts[rank], rank)
    return sorted(first.values())


class Lender:
    """Two halves of shared memory. Bucket k is in half k mod 2.

    It has no name in any folder. It is freed with the last process that mapped it. `readers`
    are the ranks of the other workers of this host, which can be none.
    """

    def __init__(
        self,
        store: TCPStore,
        host: str,
        readers: Sequence[int],
        half_bytes: int,
        deadline: timedelta,
    ):
        self._store, self._host, self._deadline = store, host, deadline
        self._readers = set(readers)
        self._descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, 2 * half_bytes)
        self._memory = _mapped(os.getpid(), self._descriptor, half_bytes)
        store.set(f"memory of {host}", f"{os.getpid()} {self._descriptor}")

    def free_half(self, number: int, num_bytes: int) -> Tensor:
        """Return the memory for a bucket, after all readers have copied bucket `number` - 2.

        Readers that have died are not waited for.
        """
        if number >= 2:
            self._wait(lambda rank: _copied(number - 2, rank))
        return self._memory[number % 2, :num_bytes]

    def filled(self, number: int) -> None:
        self._store.set(_full(self._host, number), "1")

    def wait_until_mapped(self) -> None:
        """Wait for the readers, which can map the memory until it is closed."""
        with suppress(RuntimeError):
            self._wait(_is_mapped)

    def _wait(self, key: Callable[[int], str]) -> None:
        """Wait for a key of each reader that lives. Raises RuntimeError after the deadline."""
        deadline = time.monotonic() + self._deadline.total_seconds()
        while keys := [key(rank) for rank in self._readers]:
            try:
                self._store.wait(keys, timedelta(seconds=LOOK_S))
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                for rank in [rank for rank in self._readers if not self._lives(rank)]:
                    self._readers.discard(rank)
                    self._store.set(has_all(rank), "1")  # so the trainer does not wait for it
            else:
                return

    def _lives(self, rank: int) -> bool:
        """Return whether a reader's process runs, or has not yet said which one it is."""
        if not self._store.check([_process(rank)]):
            return True
        try:
            stat = Path(f"/proc/{int(self._store.get(_process(rank)))}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"  # ended, and not yet collected

    def close(self) -> None:
        os.close(self._descriptor)


def borrowed(
    store: TCPStore,
    host: str,
    rank: int,
    sizes: Sequence[int],
    device: torch.device,
    deadline: timedelta,
) -> Iterator[Tensor]:
    """Yield copies of the buckets that the first worker of this host receives."""
    store.set(_process(rank), str(os.getpid()))
    process, descriptor = map(int, store.get(f"memory of {host}").split())
    memory = _mapped(process, descriptor, max(sizes))
    store.set(_is_mapped(rank), "1")
    for number, size in enumerate(sizes):
        store.wait([_full(host, number)], deadline)
        bucket = memory[number % 2, :size].to(device, copy=True)
        store.set(_copied(number, rank), "1")
        yield bucket


def _mapped(process: int, descriptor: int, half_bytes: int) -> Tensor:
    path = f"/proc/{process}/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=2 * half_bytes, dtype=torch.uint8).view(2, -1)


def has_all(rank: int) -> str:
    """Return the key that says that a worker needs nothing more."""
    return f"done/{rank}"


def _process(rank: int) -> str:
    return f"process of {rank}"


def _is_mapped(rank: int) -> str:
    return f"memory is mapped by {rank}"


def _full(host: str, number: int) -> str:
    return f"bucket {number} of {host}"


def _copied(number: int, rank: int) -> str:
    return f"bucket {number} is copied by {rank}"
