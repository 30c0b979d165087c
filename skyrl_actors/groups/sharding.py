"""Which rank computes which rows (pure). Row ids travel; the data is shared."""

import heapq

import numpy as np
from numpy.typing import NDArray


def assign_rows(lengths: NDArray[np.int64], num_ranks: int) -> list[tuple[int, ...]]:
    """Longest row first to the rank with the fewest tokens so far; every row lands on exactly one rank."""
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, rank = heapq.heappop(loads)
        rows[rank].append(row)
        heapq.heappush(loads, (tokens + int(lengths[row]), rank))
    return [tuple(sorted(share)) for share in rows]
