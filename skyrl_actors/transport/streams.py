"""Stream an exported weight version to the workers of engines, in buckets.

Two ways exist. Rank 0 broadcasts (gloo, NCCL). Or the rank on the same device fills two buckets in
shared memory (ipc): workers copy one while the other is filled.

The sender runs in its own thread, so that its rank can do other work. It gives up at its deadline
when a worker does not join. It reads a file, which never changes, or the live weights while they
still equal the version. In the second case the rank waits for the thread before it changes the
weights. Each stream creates its own process group, so a broken group is never used again.
"""

import json
import logging
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # type: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,  # type: ignore[reportPrivateImportUsage]
    TCPStore,  # type: ignore[reportPrivateImportUsage]
)

from skyrl_actors.messages.errors import InternalError, WeightsGone
from skyrl_actors.messages.weights import TensorEntry, WeightManifest, WeightStream, buckets
from skyrl_actors.transport.device_memory import abandoned, given_back, opened, settled, shareable
from skyrl_actors.transport.host_share import Lender, borrowed, first_of_each, has_all, host_id

log = logging.getLogger(__name__)
JOIN_S = 30.0  # longest wait for the workers of a stream to several


Take = Callable[[range], Tensor]  # the bytes of a bucket, for a range of the manifest's tensors


def open_stream(
    manifest: WeightManifest,
    asked: WeightStream,
    device: torch.device,
    take: Take,
    ended: Callable[[], None] = lambda: None,
) -> tuple[WeightStream, threading.Thread]:
    """Start to send what `take` returns; return the stream with its port, and the thread.

    `ended` is called after the last bucket, also when the stream broke.
    """
    listening = socket.create_server((asked.host, 0))  # at this address only
    port = listening.getsockname()[1]
    store = TCPStore(
        asked.host,
        port,
        asked.world_size,
        is_master=True,
        timeout=timedelta(seconds=asked.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    found = replace(asked, port=port)
    if asked.backend == "ipc":
        largest = max(
            size_of(manifest.tensors, wanted) for wanted in _buckets(manifest.tensors, asked)
        )
        memory, handle = shareable(2 * largest, device)
        found = replace(found, handle=handle)
        work = partial(_lend, take, manifest, found, store, memory.view(2, largest))
    else:
        work = partial(_send, take, manifest, found, store, place_of(asked, device))

    def send() -> None:
        try:
            work()
        finally:
            ended()

    sender = threading.Thread(target=send, daemon=True, name=f"stream-{manifest.version}")
    sender.start()
    return found, sender


def _buckets(tensors: Sequence[TensorEntry], stream: WeightStream) -> Iterator[range]:
    return buckets([t.num_bytes for t in tensors], stream.bucket_bytes)


def size_of(tensors: Sequence[TensorEntry], wanted: range) -> int:
    """Return the bytes from the first to the last of these tensors."""
    return (
        tensors[wanted[-1]].offset_bytes
        + tensors[wanted[-1]].num_bytes
        - tensors[wanted[0]].offset_bytes
    )


def from_file(manifest: WeightManifest) -> Take:
    """Read buckets from the exported file. Raises WeightsGone when it does not exist."""
    try:
        with open(manifest.path, "rb"):  # torch.from_file would create a missing file
            pass
    except FileNotFoundError:
        raise WeightsGone(
            f"version {manifest.version} was not written, and the live weights have changed since"
        ) from None
    source, tensors = (
        torch.from_file(manifest.path, shared=False, size=manifest.num_bytes, dtype=torch.uint8),
        manifest.tensors,
    )

    def take(wanted: range) -> Tensor:
        start = tensors[wanted[0]].offset_bytes
        return source[start : start + size_of(tensors, wanted)]

    return take


def from_live(tensors: Sequence[TensorEntry], live: Tensor) -> Take:
    """Read buckets from the live weights: [num_parameters] of any dtype, in the file's order."""
    dtype: torch.dtype = getattr(torch, tensors[0].dtype)

    def take(wanted: range) -> Tensor:
        start = tensors[wanted[0]].offset_bytes // dtype.itemsize
        return (
            live.detach()[start : start + size_of(tensors, wanted) // dtype.itemsize]
            .to(dtype)
            .view(torch.uint8)
        )

    return take


def _lend(
    take: Take, manifest: WeightManifest, stream: WeightStream, store: TCPStore, memory: Tensor
) -> None:
    """Write bucket k to half k mod 2, after all workers have read bucket k - 2 there."""
    deadline, readers, number = timedelta(seconds=stream.timeout_s), range(1, stream.world_size), 0
    try:
        for number, wanted in enumerate(_buckets(manifest.tensors, stream)):
            if number >= 2:
                store.wait([f"read/{number - 2}/{rank}" for rank in readers], deadline)
            bucket = take(wanted)
            memory[number % 2, : bucket.numel()].copy_(bucket, non_blocking=memory.is_cuda)
            _note_checksum(stream, store, number, bucket)
            _finished(memory.device)
            store.set(f"full/{number}", "1")
        store.wait([has_all(rank) for rank in readers], deadline)
    except (RuntimeError, ValueError) as error:  # the receiver reports it to its caller
        log.warning("the stream of %s broke at bucket %d: %s", manifest.version, number, error)
        if not store.check(["opened/1"]):
            abandoned(stream.handle, memory.device)
    finally:
        given_back(memory.device)


def place_of(stream: WeightStream, device: torch.device) -> torch.device:
    """Return the device of the buckets of a broadcast."""
    return torch.device("cpu") if stream.backend == "gloo" else device


def _send(
    take: Take,
    manifest: WeightManifest,
    stream: WeightStream,
    store: TCPStore,
    device: torch.device,
) -> None:
    try:
        # The group is created when all workers are there: NCCL waits without end for a missing one.
        hosts = _arrived(store, stream)
        group = _group(store, stream, 0, 1 + len(first_of_each(hosts)), stream.host)
        for number, wanted in enumerate(_buckets(manifest.tensors, stream)):
            bucket = take(wanted)
            _note_checksum(stream, store, number, bucket)
            group.broadcast([bucket.to(device)], _from_first()).wait()
        _finished(device)
        # The group and the store end with this thread, so wait until all workers have all.
        store.wait([has_all(rank) for rank in hosts], timedelta(seconds=stream.timeout_s))
    except (RuntimeError, ValueError) as error:  # the receiver reports it to its caller
        log.warning("the stream of %s broke: %s", manifest.version, error)


def _arrived(store: TCPStore, stream: WeightStream) -> dict[int, str]:
    """Wait for the workers, and publish the ranks and hosts of those that came.

    A worker that died must not end the loads of other engines, so the stream starts without it.
    """
    every = range(1, stream.world_size)
    wait_s = stream.timeout_s if len(every) == 1 else min(stream.timeout_s, JOIN_S)
    try:
        store.wait([f"here/{rank}" for rank in every], timedelta(seconds=wait_s))
        members = list(every)
    except RuntimeError:
        members = [rank for rank in every if store.check([f"here/{rank}"])]
        if not members:
            raise
        missing = len(every) - len(members)
        log.warning("%d worker(s) of a stream did not come within %g s", missing, wait_s)
    hosts = {rank: store.get(f"here/{rank}").decode() for rank in members}
    store.set("members", json.dumps(hosts))
    return hosts


def received(
    stream: WeightStream, tensors: list[TensorEntry], rank: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors in the file's order, as worker `rank` (1 or more).

    Raises InternalError when the sender is late or the bytes differ.
    """
    device = place_of(stream, device)
    try:
        store = TCPStore(
            stream.host,
            stream.port,
            stream.world_size,
            is_master=False,
            timeout=timedelta(seconds=stream.timeout_s),
        )
        arriving = (_borrowed if stream.backend == "ipc" else _broadcast)(
            stream, tensors, rank, device, store
        )
        for number, (wanted, bucket) in enumerate(
            zip(_buckets(tensors, stream), arriving, strict=True)
        ):
            if stream.checksums and int(store.get(f"crc32/{number}")) != _checksum(bucket):
                raise InternalError(
                    f"the bytes of tensors {wanted.start} to {wanted.stop - 1} "
                    "changed on the way: the checksums differ"
                )
            for entry in (tensors[i] for i in wanted):
                yield entry.name, tensor_in(bucket, entry, tensors[wanted[0]].offset_bytes)
        _finished(device)
        store.set(has_all(rank), "1")
    except (RuntimeError, ValueError) as error:
        raise InternalError(
            f"the trainer's stream from {stream.host}:{stream.port} broke, "
            f"or was not there within {stream.timeout_s:.0f} s: {error}"
        ) from error


def _note_checksum(stream: WeightStream, store: TCPStore, number: int, bucket: Tensor) -> None:
    if stream.checksums:
        store.set(f"crc32/{number}", str(_checksum(bucket)))


def _checksum(content: Tensor) -> int:
    return zlib.crc32(content.cpu().numpy().data)


def _broadcast(
    stream: WeightStream,
    tensors: Sequence[TensorEntry],
    rank: int,
    device: torch.device,
    store: TCPStore,
) -> Iterator[Tensor]:
    # NCCL itself finds the shortest ways between the GPUs of a host.
    store.set(f"here/{rank}", host_id() if stream.backend == "gloo" else str(rank))
    hosts = {int(key): host for key, host in json.loads(store.get("members")).items()}
    if rank not in hosts:
        raise RuntimeError("the stream began before this worker came")
    sizes = [size_of(tensors, wanted) for wanted in _buckets(tensors, stream)]
    host, first, deadline = hosts[rank], first_of_each(hosts), timedelta(seconds=stream.timeout_s)
    if rank not in first:
        yield from borrowed(store, host, rank, sizes, device, deadline)
        return
    group = _group(store, stream, 1 + first.index(rank), 1 + len(first), _own_address(stream))
    readers = [other for other in hosts if hosts[other] == host and other != rank]
    # A new bucket each time: layers keep views of theirs until they are complete.
    if not readers:
        for size in sizes:
            bucket = torch.empty(size, dtype=torch.uint8, device=device)
            group.broadcast([bucket], _from_first()).wait()
            yield bucket
        return
    with closing(Lender(store, host, readers, max(sizes), deadline)) as lender:
        for number, size in enumerate(sizes):
            half = lender.free_half(number, size)
            group.broadcast([half], _from_first()).wait()
            lender.filled(number)
            yield half.clone()
        lender.wait_until_mapped()


def _borrowed(
    stream: WeightStream,
    tensors: Sequence[TensorEntry],
    rank: int,
    device: torch.device,
    store: TCPStore,
) -> Iterator[Tensor]:
    shared = opened(stream.handle, device)
    store.set(f"opened/{rank}", "1")
    half = max(size_of(tensors, wanted) for wanted in _buckets(tensors, stream))
    for number, wanted in enumerate(_buckets(tensors, stream)):
        store.wait([f"full/{number}"], timedelta(seconds=stream.timeout_s))
        start = number % 2 * half
        bucket = shared[start : start + size_of(tensors, wanted)].to(device, copy=True)
        _finished(device)
        store.set(f"read/{number}/{rank}", "1")
        yield bucket
    del shared
    given_back(device)


def _finished(device: torch.device) -> None:
    """Wait for the device. NCCL's wait only orders the device's work."""
    settled(device)


def _own_address(stream: WeightStream) -> str:
    """Return this host's address on the route to the sender."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((stream.host, stream.port))
        return probe.getsockname()[0]


def tensor_in(content: Tensor, entry: TensorEntry, start: int = 0) -> Tensor:
    """Return one tensor of a file's bytes (`content` [n] uint8, from byte `start` on).

    Raises InternalError when its checksum differs.
    """
    dtype: torch.dtype = getattr(torch, entry.dtype)
    own = content[entry.offset_bytes - start :][: torch.Size(entry.shape).numel() * dtype.itemsize]
    if entry.checksum is not None and _checksum(own) != entry.checksum:
        raise InternalError(
            f"the bytes of tensor {entry.name} changed on the way: the checksums differ"
        )
    return own.view(dtype).view(entry.shape)


def _group(store: TCPStore, stream: WeightStream, rank: int, world_size: int, address: str) -> Any:
    prefixed, deadline = PrefixStore("weights", store), timedelta(seconds=stream.timeout_s)
    if stream.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        return dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
    gloo = cast(Any, ProcessGroupGloo)  # its stubs lack _Options
    options = gloo._Options()
    # By address: the host's own name may resolve to the loopback device.
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = deadline
    return gloo(prefixed, rank, world_size, options)


def _from_first() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
