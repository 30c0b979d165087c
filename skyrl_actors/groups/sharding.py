"""Assign rows to ranks (pure). Calls carry row ids; all ranks share the data."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = tuple[int, ...]


def costs_of(lengths: NDArray[np.int64], hidden_size: int) -> NDArray[np.float64]:
    """Return the cost of each row, L · (1 + L / 12H).

    The unit is one token through the linear layers.

    A transformer layer of width H has about 12H² weights, so 24H² operations for each token. Causal
    attention adds 2LH.
    """
    return (
        lengths * (1 + lengths / (12 * hidden_size)) if hidden_size else lengths.astype(np.float64)
    )


def assign_parts(
    lengths: Sequence[NDArray[np.int64]], num_ranks: int, hidden_size: int = 0
) -> list[list[Rows]]:
    """Return for each rank the rows of each part. Every row goes to exactly one rank.

    The costliest row goes first, to the rank with the lowest cost so far.
    """
    shares: list[list[list[int]]] = [[[] for _ in lengths] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    items = [
        (-cost, part, row)
        for part, ls in enumerate(lengths)
        for row, cost in enumerate(costs_of(ls, hidden_size).tolist())
    ]
    for cost, part, row in sorted(items):
        load, rank = heapq.heappop(loads)
        shares[rank][part].append(row)
        heapq.heappush(loads, (load - cost, rank))
    return [[tuple(sorted(rows)) for rows in parts] for parts in shares]
