"""The processes in which other tests train: one that hangs fails its own test only."""

import time

import pytest

from tests.workers.ranks import Ranks


def hang_on_second(rank: int, world_size: int, port: int) -> int:
    if rank == 1:
        time.sleep(3600)
    return rank


def port_of(rank: int, world_size: int, port: int) -> int:
    return port


@pytest.mark.slow
def test_after_a_rank_that_hangs_the_next_run_has_new_ranks():
    ranks = Ranks(2, timeout_s=30.0)
    first = ranks.run(port_of)
    ranks.timeout_s = 1.0
    with pytest.raises(AssertionError, match=r"^rank 1: did not answer$"):
        ranks.run(hang_on_second)
    ranks.timeout_s = 30.0
    second = ranks.run(port_of)
    ranks.close()
    assert second[0] == second[1] != first[0], "their process group has an address of its own"
