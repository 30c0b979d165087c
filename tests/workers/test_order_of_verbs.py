"""Results of a rank do not depend on earlier forwards, loads or saves, in every strategy.

The reference is float64 on one rank.
"""

from pathlib import Path

import numpy as np
import pytest

from skyrl_actors.config.strategies import Fsdp2Strategy
from tests.workers import order_runs
from tests.workers.ranks import Ranks
from tests.workers.references import batch
from tests.workers.strategy_runs import STRATEGIES, values_in_order
from tests.workers.tiny_models import make

KEEPS_LAYERS = {"fsdp2 without resharding": Fsdp2Strategy(reshard_after_forward=False)}
DATA = [batch(20 + i, lengths) for i, lengths in enumerate(((9, 4, 17, 30), (12, 3, 8), (21, 6)))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3-wide", tmp_path_factory.mktemp("qwen3-wide"))


Logprobs = dict[str, dict[str, list[np.ndarray]]]


def logprobs(pool: Ranks, base: Path, strategy: str, folder: Path, **options: str) -> Logprobs:
    """Return logprobs by kind of model and by order, [tokens] for each model."""
    folder.mkdir()
    found = pool.run(
        order_runs.orders,
        str(base),
        {**STRATEGIES, **KEEPS_LAYERS}[strategy],
        DATA,
        str(folder),
        options,
    )
    return {
        kind: {
            order: [
                values_in_order(DATA[0], [(*of_rank[kind][order][i], {}) for of_rank in found])
                for i in range(len(outputs))
            ]
            for order, outputs in orders.items()
        }
        for kind, orders in found[0].items()
    }


@pytest.fixture(scope="module")
def exact(
    ranks: dict[int, Ranks], base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Logprobs:
    return logprobs(
        ranks[1], base, "replica", tmp_path_factory.mktemp("exact") / "f", dtype="float64"
    )


EACH = [
    pytest.param(name, marks=pytest.mark.slow) if name == "jax" else name for name in STRATEGIES
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", [*EACH, *KEEPS_LAYERS])
def test_forwards_loads_and_saves_between_gradient_and_step(
    ranks: dict[int, Ranks], base: Path, exact: Logprobs, tmp_path: Path, strategy: str, dtype: str
):
    found = logprobs(ranks[2], base, strategy, tmp_path / "f", dtype=dtype)
    for kind, orders in exact.items():
        for order, wanted in orders.items():
            for i, theirs in enumerate(wanted):
                error = np.abs(found[kind][order][i] - theirs)
                if dtype == "float32":
                    assert error.max() < 5e-5, (kind, order)
                else:
                    assert error.mean() < 0.05, (kind, order)


def test_each_order_of_verbs_ends_with_different_weights(exact: Logprobs):
    """Otherwise the test above would not detect stale weights."""
    for kind, orders in exact.items():
        for order in (
            "forward between gradient and step",
            "step after a reference",
            "sampler saved between gradient and step",
        ):
            for there, start in zip(orders[order], orders["at the start"], strict=True):
                assert np.abs(there - start).mean() > 0.3, (kind, order)
