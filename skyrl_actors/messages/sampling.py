"""Tokens that are asked for, or drawn, at the positions of a prompt (frozen)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """Which cells of a matrix are listed, row by row (CSR)."""

    crow: tuple[int, ...]  # [rows + 1]
    col: tuple[int, ...]  # [listed cells]


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Ids whose logprobs are asked for: row i is about prompt token i + 1. -1 asks for nothing."""

    shape: tuple[int, int]  # (P - 1, K)
    ids: tuple[int, ...]  # all cells row by row, or the listed ones of `layout`
    layout: SparseLayout | None = None

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of each id."""
        counts = np.diff(self.layout.crow) if self.layout else np.full(self.shape[0], self.shape[1])
        return np.repeat(np.arange(self.shape[0]), counts)


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """In the shape and layout of the question."""

    values: NDArray[np.float32]  # one for each id; 0 for -1
    shape: tuple[int, int]
    layout: SparseLayout | None = None


@dataclass(frozen=True, slots=True)
class PromptAlternatives:
    """Draws with replacement, at the temperature of the request, for each prompt token but the first."""

    tokens: NDArray[np.int64]  # [P - 1, k]
    logprobs: NDArray[np.float32]  # [P - 1, k], at temperature 1
