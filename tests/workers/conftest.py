"""Training ranks that these tests share, because their start is slower than most tests."""

from collections.abc import Iterator

import pytest

from tests.workers.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Return process groups by their number of ranks."""
    pools = {count: Ranks(count) for count in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.close()
