"""Training ranks that the tests of this folder share: starting them takes longer than most tests."""

from collections.abc import Iterator

import pytest

from tests.workers.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Process groups by their number of ranks."""
    pools = {count: Ranks(count) for count in (1, 2)}
    yield pools
    for pool in pools.values():
        pool.close()
