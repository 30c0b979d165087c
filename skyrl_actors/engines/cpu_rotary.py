"""Rotary embeddings on a CPU of queries and keys that are cut into heads.

vLLM's kernel for CPUs takes [T, heads · D]. LFM2 gives it [T, heads, D], and the kernel then
rotates by wrong angles without an error.
"""

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def register() -> None:
    """Make vLLM's kernel get queries and keys with their heads joined."""
    kind: Any = RotaryEmbedding
    rotate = kind.forward_cpu

    def forward_cpu(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        joined = [None if part is None else part.flatten(positions.ndim) for part in (query, key)]
        found: tuple[Tensor, Tensor | None] = rotate(self, positions, *joined)
        q, k = found
        return q.view_as(query), k if k is None or key is None else k.view_as(key)

    kind.forward_cpu = forward_cpu
