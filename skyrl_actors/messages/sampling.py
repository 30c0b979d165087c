"""Tokens that are requested or sampled at the positions of a prompt (frozen)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SparseLayout:
    """The listed cells of a sparse matrix, row by row (CSR)."""

    crow: tuple[int, ...]  # [rows + 1]
    col: tuple[int, ...]  # [listed cells]


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Ids whose logprobs are requested. Row i is about prompt token i + 1; -1 requests none."""

    shape: tuple[int, int]  # (P - 1, K)
    ids: tuple[int, ...]  # all cells, row by row, or the listed cells of `layout`
    layout: SparseLayout | None = None

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row of each id."""
        counts = np.diff(self.layout.crow) if self.layout else np.full(self.shape[0], self.shape[1])
        return np.repeat(np.arange(self.shape[0]), counts)


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The logprobs of PromptTargets, in the same shape and layout."""

    values: NDArray[np.float32]  # one for each id; 0 for -1
    shape: tuple[int, int]
    layout: SparseLayout | None = None


@dataclass(frozen=True, slots=True)
class PromptAlternatives:
    """Tokens sampled with replacement at the request's temperature, for all prompt tokens but 0."""

    tokens: NDArray[np.int64]  # [P - 1, k]
    logprobs: NDArray[np.float32]  # [P - 1, k], at temperature 1
