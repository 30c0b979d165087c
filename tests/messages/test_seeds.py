"""Seeds that are derived from names."""

import uuid
from dataclasses import replace

import pytest

from skyrl_actors.messages.paths import owner_mark
from skyrl_actors.messages.requests import Sample, SamplingParams
from skyrl_actors.messages.seeds import SEEDS, derived_seed, seeded

SAMPLE = Sample(sampler_id="s", prompt=(1,), params=SamplingParams(max_tokens=4, num_samples=256))


@pytest.mark.parametrize("mark", ["", owner_mark("0123456789")])
def test_request_ids_give_distinct_seeds_over_the_whole_range(mark: str):
    ids = [f"r{uuid.UUID(int=number * 2**64 + number).hex}{mark}" for number in range(100_000)]
    seeds = [seeded(SAMPLE, request_id).params.seed or 0 for request_id in ids]
    assert len(set(seeds)) == len(ids)
    assert min(seeds) < SEEDS // 1000 and max(seeds) > SEEDS - SEEDS // 1000
    assert max(seeds) + SAMPLE.params.num_samples <= SEEDS
    assert [seeded(SAMPLE, request_id).params.seed for request_id in ids[:3]] == seeds[:3]


def test_a_given_seed_is_kept():
    given = replace(SAMPLE, params=replace(SAMPLE.params, seed=0))
    assert seeded(given, "r1") is given


def test_name_parts_with_the_same_concatenation_give_distinct_seeds():
    assert (
        len(
            {
                derived_seed(1, 23),
                derived_seed(12, 3),
                derived_seed("1", "2", "3"),
                derived_seed("123"),
            }
        )
        == 4
    )
