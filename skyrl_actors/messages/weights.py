"""Descriptions of weight versions on their way from trainers to engines and files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

ADAPTER_FILE = "adapter_model.safetensors"
SCORED_FILE = "scored.json"  # in a checkpoint: the trainer's logprobs for checks of engines
Materialize = Literal["eager", "lazy"]
"""When full weights are written: at the save, or before they change while still needed."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file of weights."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    offset_bytes: int  # in the file
    num_bytes: int = 0
    checksum: int | None = None  # crc32 of its bytes, where the transfer asks for them


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """One version of a policy's weights, complete and immutable.

    kind "full": `path` is one flat file of all tensors, for the engine's weight update, once it is
    written.

    kind "lora": `path` is a folder in peft's format, for the engine's adapter table. If the
    transfer uses checksums, `tensors` has the adapter's weights file as one entry.
    """

    version: str  # globally unique, e.g. "s1:train:0@7"
    kind: Literal["full", "lora"]
    path: str
    num_bytes: int
    tensors: tuple[TensorEntry, ...] = ()
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Where a trainer rank sends a version of full weights to the workers of engines.

    The weights are sent in buckets. gloo and nccl broadcast them; with ipc the workers read the
    rank's memory.
    """

    host: str
    port: int
    world_size: int  # the sender and the workers of all engines
    backend: Literal["gloo", "nccl", "ipc"]
    bucket_bytes: int
    timeout_s: float
    handle: tuple[Any, ...] = ()  # ipc: memory of two adjacent buckets
    checksums: bool = False  # also send the crc32 of every bucket
    id: str = ""  # the stream_id of its `feed` call
    first_rank: int = 1  # of the workers of the engine that this copy is for; 0 is the sender


def buckets(sizes: list[int], bucket_bytes: int) -> Iterator[range]:
    """Yield index ranges of tensors that are sent together.

    Each range has at most `bucket_bytes`, or is one larger tensor.
    """
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > bucket_bytes:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerWeights:
    """The weights that a sampler is pinned to.

    They are the base (no parts), an adapter, or full weights in one or more files. `scored` has
    logprobs (nats) of the last tokens of `scored_prompt`, which the trainer computed in dtype
    `scored_in`. Engines are compared with them. It is empty when that check is off. `base_model`
    is empty in journals of earlier versions: it is the default then.
    """

    version: str
    parts: tuple[WeightManifest, ...] = ()
    scored: tuple[float, ...] = ()
    scored_in: str = ""
    scored_prompt: tuple[int, ...] = ()
    base_model: str = ""

    @property
    def adapter(self) -> WeightManifest | None:
        return self.parts[0] if self.parts and self.parts[0].kind == "lora" else None
