"""Ranks that share one copy of the weights compute what one rank computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.messages.model import LoraSpec
from tests.jax_workers.mesh_runs import prepared, starts_with_another_version, trained
from tests.workers.ranks import Ranks
from tests.workers.strategy_runs import PROGRAMS
from tests.workers.tiny_models import make

FORMS = {"adapter": LoraSpec(rank=4), "full": None}


@contextmanager
def processes(count: int) -> Iterator[Ranks]:
    """A process is in one mesh for its whole life."""
    made = Ranks(count, timeout_s=280.0)
    try:
        yield made
    finally:
        made.close()


def on_mesh(base: Path, fsdp: int, tensor: int, ranks: int, form: str, **options: Any) -> Any:
    strategy = JaxStrategy(cache=PROGRAMS, prepare_s=0, fsdp=fsdp, tensor=tensor)
    with processes(ranks) as made:
        return made.run(trained, str(base), strategy, FORMS[form], options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(base: Path) -> dict[str, Any]:
    """What one rank computes."""
    return {form: on_mesh(base, 1, 1, 1, form)[0] for form in FORMS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fsdp", "tensor", "ranks", "form"),
    [
        (2, 1, 2, "adapter"),
        (1, 2, 2, "full"),
        (2, 2, 4, "adapter"),
        (2, 1, 4, "full"),  # two copies
    ],
)
def test_a_mesh_computes_what_one_rank_computes(
    base: Path, alone: dict[str, Any], fsdp: int, tensor: int, ranks: int, form: str
):
    found, wanted = on_mesh(base, fsdp, tensor, ranks, form), alone[form]
    np.testing.assert_allclose(found[0]["norms"], wanted["norms"], rtol=1e-5)
    for name, value in wanted["weights"].items():
        np.testing.assert_allclose(found[0]["weights"][name], value, atol=1e-5, err_msg=name)
    scored = dict[tuple[int, int], np.ndarray]()
    for each in found:
        assert each["share"] == 1 / (fsdp * tensor)
        assert not scored.keys() & each["scored"].keys()  # each row is reported once
        scored |= each["scored"]
    assert scored.keys() == wanted["scored"].keys()
    for key, values in wanted["scored"].items():
        np.testing.assert_allclose(scored[key], values, atol=1e-5)


@pytest.mark.slow
def test_the_same_mesh_computes_the_same_bits_and_reads_no_programs(base: Path):
    """On CPUs, ranks of a mesh that read their programs wait forever now and then."""
    first, second = (on_mesh(base, 2, 1, 2, "adapter") for _ in range(2))
    for name, value in first[0]["weights"].items():
        assert (second[0]["weights"][name] == value).all()
    for each in second:
        assert ", 0 of them from the cache" in each["programs"]


@pytest.mark.slow
def test_a_mesh_in_bfloat16_that_recomputes_is_near_one_rank(base: Path):
    """A mesh adds in another order, so values differ by roundings of bfloat16."""
    options = {"dtype": "bfloat16", "activations": "recompute"}
    (wanted,), found = (on_mesh(base, fsdp, 1, fsdp, "adapter", **options) for fsdp in (1, 2))
    np.testing.assert_allclose(found[0]["norms"], wanted["norms"], rtol=0.05)
    for key, values in wanted["scored"].items():
        assert np.abs(found[0]["scored"][key] - values).mean() < 0.02


@pytest.mark.slow
def test_usual_calls_of_a_mesh_need_no_program_that_was_not_prepared(base: Path, tmp_path: Path):
    strategy = JaxStrategy(cache=tmp_path, prepare_s=600, fsdp=2)
    with processes(2) as ranks:
        (before, after, norms), second = ranks.run(prepared, str(base), strategy)
    assert before == after
    assert second == (before, after, norms)


@pytest.mark.slow
def test_a_mixture_with_adapters_on_its_experts_is_divided_too(tmp_path: Path):
    base = make("qwen3-moe", tmp_path)
    (wanted,), found = (on_mesh(base, fsdp, 1, fsdp, "adapter") for fsdp in (1, 2))
    for name, value in wanted["weights"].items():
        np.testing.assert_allclose(found[0]["weights"][name], value, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_ranks_with_different_versions_of_jax_are_named(base: Path):
    with processes(2) as ranks:
        for error in ranks.run(starts_with_another_version, str(base)):
            assert "policy[0] has jax 0." in error
            assert "policy[1] has jax 0.9.9 and jaxlib" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 3}, "fsdp 2 times tensor 2 does not divide num_ranks 3"),
        ({"num_ranks": 4, "full_strategy": {"type": "jax"}}, "fsdp and tensor differ"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        GroupConfig.model_validate({"strategy": {"type": "jax", "fsdp": 2, "tensor": 2}, **options})
