"""Layouts of routed experts: every pair has a row in a block of its expert."""

from functools import partial

import jax
import numpy as np
import pytest

from skyrl_actors.jax_workers.experts import routed_rows, rows_in_block


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (5, 2, 3), (60, 2, 9), (33, 4, 4)])
def test_every_pair_is_in_a_block_of_its_expert(tokens: int, k: int, experts: int):
    """Routers choose any experts, or all the same, or few of them."""
    generator = np.random.default_rng(0)
    layout = jax.jit(partial(routed_rows, experts=experts))
    for number in range(60):
        scores = generator.random((tokens, experts))
        scores[:, : (0, k, k + 1)[number % 3]] += 1
        chosen = np.argsort(-scores)[:, :k].astype(np.int32)
        found = layout(chosen)
        block = rows_in_block(chosen.size, experts)
        places, of_row = np.asarray(found.places), np.asarray(found.tokens)
        assert len(of_row) == block * len(found.experts)
        assert len(set(places.reshape(-1).tolist())) == chosen.size
        assert (of_row[places] == np.arange(tokens)[:, None]).all()
        assert (np.asarray(found.experts)[places // block] == chosen).all()
        others = np.setdiff1d(np.arange(len(of_row)), places)
        assert (of_row[others] == tokens).all()
