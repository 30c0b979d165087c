"""Weights on their way from trainers to engines and files."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "float32", "bfloat16"
    offset_bytes: int  # in the file


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One version of a policy's weights, complete and never changed again.

    kind "full": `path` is one flat file of all tensors, for the engine's weight update.
    kind "lora": `path` is a folder in peft's format, for the engine's adapter table.
    """

    version: str  # unique for ever, e.g. "s1:train:0@7"
    kind: Literal["full", "lora"]
    path: str
    num_bytes: int
    tensors: tuple[TensorEntry, ...] = ()
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """What a sampler is pinned to: the base (no parts), an adapter over it, or full weights in one or more files."""

    version: str
    parts: tuple[WeightManifest, ...] = ()

    @property
    def adapter(self) -> WeightManifest | None:
        return self.parts[0] if self.parts and self.parts[0].kind == "lora" else None
