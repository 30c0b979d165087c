"""Weights on their way from trainers to engines and files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

ADAPTER_FILE = "adapter_model.safetensors"
SCORED_FILE = "scored.json"  # in a checkpoint: the trainer's logprobs of the prompt by which engines are compared
Freeze = Literal["always", "when_needed"]
"""When a version of full weights is written: as it is saved, or before the weights change while somebody may still need it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    offset_bytes: int  # in the file
    num_bytes: int = 0
    checksum: int | None = None  # crc32 of its bytes, where the transfer asks for them


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One version of a policy's weights, complete and never changed again.

    kind "full": `path` is one flat file of all tensors, for the engine's weight update, once it is written.
    kind "lora": `path` is a folder in peft's format, for the engine's adapter table; `tensors` has its file of weights as one entry,
    where the transfer asks for checksums.
    """

    version: str  # unique for ever, e.g. "s1:train:0@7"
    kind: Literal["full", "lora"]
    path: str
    num_bytes: int
    tensors: tuple[TensorEntry, ...] = ()
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Where a rank of the trainers gives one version of full weights, bucket by bucket, to the workers of one engine: gloo and nccl
    broadcast, ipc lets them read its memory."""

    host: str
    port: int
    world_size: int  # the sender and the workers
    backend: Literal["gloo", "nccl", "ipc"]
    bucket_bytes: int
    timeout_s: float
    handle: tuple[Any, ...] = ()  # ipc: of two buckets, one behind the other
    checksums: bool = False  # crc32 of every bucket travels too
    id: str = ""  # which `feed` it is for


def buckets(sizes: list[int], bucket_bytes: int) -> Iterator[range]:
    """Indices of neighbouring tensors that travel together: at most `bucket_bytes`, or one larger tensor."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > bucket_bytes:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """What a sampler is pinned to: the base (no parts), an adapter over it, or full weights in one or more files. `scored`: the
    logprobs of a fixed prompt, nats, that the trainer computed in `scored_in` (its dtype), with which engines are compared; none where
    that is switched off."""

    version: str
    parts: tuple[WeightManifest, ...] = ()
    scored: tuple[float, ...] = ()
    scored_in: str = ""

    @property
    def adapter(self) -> WeightManifest | None:
        return self.parts[0] if self.parts and self.parts[0].kind == "lora" else None
