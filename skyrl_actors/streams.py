"""Both ends of a weight stream: a file that rank 0 exported is broadcast, bucket by bucket, to the workers of one engine.

The sender has a thread of its own, so that its rank goes on with other work, and gives up at its deadline when somebody does not
join. The file is a frozen version: what arrives is what was asked for, whatever has been trained since. A group of
processes is made for each stream, so nothing that broke is ever used again.
"""

import logging
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[reportPrivateImportUsage]

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.weights import TensorEntry, WeightManifest, WeightStream, buckets

log = logging.getLogger(__name__)


def open_stream(manifest: WeightManifest, asked: WeightStream, device: torch.device) -> WeightStream:
    """Begin to send; answers with the port that was free. Raises FileNotFoundError when the version is gone."""
    source = _mapped(manifest)
    store = TCPStore(
        asked.host, 0, asked.world_size, is_master=True, timeout=timedelta(seconds=asked.timeout_s), wait_for_workers=False
    )
    found = replace(asked, port=store.port)
    arguments = (source, manifest, found, store, device)
    threading.Thread(target=_send, args=arguments, daemon=True, name=f"stream-{manifest.version}").start()
    return found


def _mapped(manifest: WeightManifest) -> Tensor:
    with open(manifest.path, "rb"):  # torch.from_file would make a missing one
        pass
    return torch.from_file(manifest.path, shared=False, size=manifest.num_bytes, dtype=torch.uint8)


def _send(source: Tensor, manifest: WeightManifest, stream: WeightStream, store: TCPStore, device: torch.device) -> None:
    try:
        group = _group(store, stream, 0)
        for wanted in buckets([t.num_bytes for t in manifest.tensors], stream.bucket_bytes):
            first, last = manifest.tensors[wanted[0]], manifest.tensors[wanted[-1]]
            bucket = source[first.offset_bytes : last.offset_bytes + last.num_bytes].to(device)
            group.broadcast([bucket], _from_first()).wait()
    except (RuntimeError, ValueError) as error:  # the other end tells whoever waits for these weights
        log.warning("the stream of %s broke: %s", manifest.version, error)


def received(stream: WeightStream, tensors: list[TensorEntry], rank: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Named tensors in the order of the file, as worker `rank` (from 1 on). Raises InternalError when the sender is not
    there in time or bytes differ."""
    try:
        store = TCPStore(
            stream.host, stream.port, stream.world_size, is_master=False, timeout=timedelta(seconds=stream.timeout_s)
        )
        group = _group(store, stream, rank)
        for wanted in buckets([t.num_bytes for t in tensors], stream.bucket_bytes):
            start = tensors[wanted[0]].offset_bytes
            size = tensors[wanted[-1]].offset_bytes + tensors[wanted[-1]].num_bytes - start
            bucket = torch.empty(size, dtype=torch.uint8, device=device)  # a new one: layers hold theirs until they are whole
            group.broadcast([bucket], _from_first()).wait()
            for entry in (tensors[i] for i in wanted):
                yield entry.name, tensor_in(bucket, entry, start)
    except (RuntimeError, ValueError) as error:
        raise InternalError(
            f"the trainer's stream from {stream.host}:{stream.port} broke, or was not there within {stream.timeout_s:.0f} s: {error}"
        ) from error


def tensor_in(content: Tensor, entry: TensorEntry, start: int = 0) -> Tensor:
    """One tensor of a file's bytes (`content` [n] uint8, from byte `start` on). Raises InternalError when its checksum differs."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    own = content[entry.offset_bytes - start :][: torch.Size(entry.shape).numel() * dtype.itemsize]
    if entry.checksum is not None and zlib.crc32(own.cpu().numpy().data) != entry.checksum:
        raise InternalError(f"tensor {entry.name} arrived with other bytes than it left with")
    return own.view(dtype).view(entry.shape)


def _group(store: TCPStore, stream: WeightStream, rank: int) -> Any:
    prefixed, deadline = PrefixStore("weights", store), timedelta(seconds=stream.timeout_s)
    if stream.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        return dist.ProcessGroupNCCL(prefixed, rank, stream.world_size, options)
    return ProcessGroupGloo(prefixed, rank, stream.world_size, deadline)


def _from_first() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
