"""Groups of ranks: those that share the tokens of a pass, or a copy of the weights."""

from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch.distributed as dist


def own_group(blocks: tuple[tuple[int, ...], ...], timeout_s: float) -> dist.ProcessGroup:
    """Create a group for each block of ranks, and return the one with this rank.

    Collective. Every block is created on every rank, as torch requires.
    """
    mine = None
    for ranks in blocks:
        made = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine = made
    assert isinstance(mine, dist.ProcessGroup)
    return mine


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The ranks that share one copy of the weights, and those that hold the same shard."""

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None  # None: there is one copy
    writes: bool  # this rank is in the first copy


@cache
def shard_groups(shard_ranks: int, timeout_s: float) -> ShardGroups:
    """Return the groups for copies over `shard_ranks` consecutive ranks each. Collective."""
    world = dist.get_world_size()
    if shard_ranks == world:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return ShardGroups(dist.group.WORLD, None, True)
    starts = range(0, world, shard_ranks)
    shards = own_group(tuple(tuple(range(s, s + shard_ranks)) for s in starts), timeout_s)
    replicas = own_group(
        tuple(tuple(range(place, world, shard_ranks)) for place in range(shard_ranks)), timeout_s
    )
    return ShardGroups(shards, replicas, dist.get_rank() < shard_ranks)
