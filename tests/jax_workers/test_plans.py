"""Plans of passes: every row once, one model in a block, few sizes and little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.jax_passes import LOADS, planned
from skyrl_actors.jax_workers.plans import (
    aligned,
    block_of,
    layout_of,
    plan_passes,
    size_of,
    sizes_up_to,
    slots_of,
    window_of,
    windows_of,
)

LENGTHS = st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=20), min_size=1, max_size=9)


@given(LENGTHS, st.sampled_from([32, 100, 512, 1024, 4096]))
def test_every_row_is_in_one_pass_and_has_places_of_its_own(lengths: list[list[int]], budget: int):
    parts = [(range(len(own)), np.asarray(own)) for own in lengths]
    passes = plan_passes(parts, budget)
    rows = [(share.part, row) for plan in passes for share in plan.shares for row in share.rows]
    assert sorted(rows) == [
        (part, row) for part, own in enumerate(lengths) for row in range(len(own))
    ]
    for plan in passes:
        segments = [share.num_tokens for share in plan.shares]
        assert [block.length for block in plan.blocks] == [
            lengths[share.part][row] for share in plan.shares for row in share.rows
        ]
        layout = layout_of(plan.blocks, segments)
        longest = max(block.length for block in plan.blocks)
        assert layout.size in sizes_up_to(budget) or layout.size == size_of(longest)
        assert longest <= layout.window <= layout.size
        assert layout.size % (4 * layout.block) == 0
        assert len({*layout.places.tolist()}) == plan.num_tokens == len(layout.places)
        owners = np.repeat(np.arange(len(segments)), segments)
        assert (layout.of_block[layout.places // layout.block] == owners).all()
        inside = layout.positions[layout.places]
        starts = np.flatnonzero(inside == 0)
        assert np.diff([*starts, len(inside)]).tolist() == [b.length for b in plan.blocks]
        padding = np.setdiff1d(np.arange(layout.size), layout.places)
        assert not layout.numbers[padding].any() and layout.numbers[layout.places].all()


def test_the_same_call_gives_the_same_plan():
    lengths = np.asarray([7, 300, 12, 12, 90])
    one, other = (plan_passes([(range(5), lengths)], 256) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("load", LOADS)
def test_thousand_calls_need_few_programs_and_little_padding(load: str):
    found = planned(load)
    tiny = "one row of 16" in load
    assert found["programs"] <= 24
    assert found["padding"] <= (0.25 if tiny else 0.15)


def test_sizes_and_places():
    assert [size_of(n) for n in (1, 32, 33, 130, 257, 4096, 4097)] == [
        32,
        32,
        64,
        160,
        512,
        4096,
        8192,
    ]
    assert sizes_up_to(1000) == [32, 64, 96, 128, 160, 192, 256, 512]
    assert sizes_up_to(10) == [32]
    assert [block_of(size) for size in (32, 256, 512, 4096)] == [4, 4, 8, 32]
    assert [window_of(n, 4096) for n in (5, 65, 257, 600)] == [64, 256, 512, 2048]
    assert window_of(5, 128) == 128
    assert [slots_of(n, 4096) for n in (1, 2, 9)] == [1, 8, 64]
    assert slots_of(1, 128) == 8
    assert aligned(33, 32) == 64


@given(LENGTHS, st.sampled_from([32, 100, 512, 1024, 4096]))
def test_the_windows_of_a_size_are_known_ahead(lengths: list[list[int]], budget: int):
    parts = [(range(len(own)), np.asarray(own)) for own in lengths]
    for plan in plan_passes(parts, budget):
        layout = layout_of(plan.blocks, [share.num_tokens for share in plan.shares])
        assert layout.window in windows_of(layout.size, 900)


@pytest.mark.parametrize("parts", [[[256] * 8], [[256] * 4, [256] * 4], [[64] * 16, [1024]]])
def test_rows_that_fill_a_size_are_one_pass(parts: list[list[int]]):
    given = [(range(len(own)), np.asarray(own)) for own in parts]
    assert [plan.num_tokens for plan in plan_passes(given, 4096)] == [2048]
