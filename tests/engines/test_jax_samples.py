"""The most likely tokens of a prompt's positions."""

import numpy as np
import pytest

from skyrl_actors.engines.jax_samples import _largest


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_values_are_those_of_a_stable_sort(seed: int):
    rng = np.random.default_rng(seed)
    row = rng.integers(0, 12, 40).astype(np.float32)  # many are equal
    for count in (1, 3, 17, 40):
        wanted = np.argsort(-row, kind="stable")[:count]
        assert _largest(row, count).tolist() == wanted.tolist()
