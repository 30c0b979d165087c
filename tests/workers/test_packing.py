"""How rows are cut into passes, and attention over them in one kernel where it exists."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.workers import varlen
from skyrl_actors.workers.attention import attend_by_blocks
from skyrl_actors.workers.blocks import Block, blocks_between, row_cuts
from skyrl_actors.workers.packing import Pass, plan_passes

PARTS = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=1, max_size=5)


def rows_in(plan: Pass) -> list[tuple[int, int]]:
    return [(share.part, row) for share in plan.shares for row in share.rows]


def check(plan: Pass, lengths: list[np.ndarray]) -> None:
    """Check that shares and blocks give the same location for every row."""
    starts = [
        block.start + i * block.length for block in plan.blocks for i in range(block.num_rows)
    ]
    sizes = [block.length for block in plan.blocks for _ in range(block.num_rows)]
    assert sizes == [int(lengths[part][row]) for part, row in rows_in(plan)]
    assert starts == np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
    assert plan.num_tokens == sum(sizes) == sum(share.num_tokens for share in plan.shares)
    assert [share.start for share in plan.shares] == np.cumsum(
        [0] + [s.num_tokens for s in plan.shares]
    )[:-1].tolist()
    assert plan.positions().tolist() == [i for size in sizes for i in range(size)]


@given(PARTS, st.integers(1, 100))
def test_every_row_is_in_one_pass_and_passes_stay_within_the_budget(
    parts: list[list[int]], budget: int
):
    lengths = [np.asarray(part, np.int64) for part in parts]
    plans = plan_passes(
        [(range(len(part)), ls) for part, ls in zip(parts, lengths, strict=True)], budget
    )
    assert sorted(row for plan in plans for row in rows_in(plan)) == [
        (p, r) for p, part in enumerate(parts) for r in range(len(part))
    ]
    for plan in plans:
        check(plan, lengths)
        assert plan.num_tokens <= budget or len(rows_in(plan)) == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_padding_is_a_separate_row(row_lengths: list[int], multiple: int):
    lengths = np.asarray(row_lengths, np.int64)
    (plan,) = plan_passes([(range(len(lengths)), lengths)], 10_000)
    padded = plan.padded_to(multiple)
    assert (padded.num_tokens + padded.padding) % multiple == 0 and padded.padding < multiple
    assert padded.shares == plan.shares and padded.blocks[: len(plan.blocks)] == plan.blocks
    assert len(padded.positions()) == padded.num_tokens + padded.padding


def test_bounds_of_rows():
    bounds, longest = varlen.row_bounds((Block(0, 2, 5), Block(10, 1, 19)), torch.device("cpu"))
    assert bounds.tolist() == [0, 5, 10, 29] and longest == 19


def test_without_the_kernel_attention_runs_by_blocks():
    assert not varlen.can_attend(torch.zeros(1))
    assert not varlen.agrees(attend_by_blocks, torch.device("cpu"), torch.bfloat16, 16)


@pytest.mark.parametrize(
    ("factor", "accepted"), [(1.0, True), (1.012, False), (float("nan"), False)]
)
def test_a_kernel_must_be_as_exact_as_attention_by_blocks(
    factor: float, accepted: bool, monkeypatch: pytest.MonkeyPatch
):
    """An error of 1.2 % is less than two roundings of bfloat16 around 1, and is refused."""

    def kernel(*arguments: Any) -> torch.Tensor:
        return attend_by_blocks(*arguments) * factor

    monkeypatch.setattr(varlen, "attend", kernel)
    found = varlen.agrees(attend_by_blocks, torch.device("cpu"), torch.bfloat16, 64)
    assert found == accepted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_equals_attention_by_blocks():
    assert varlen.agrees(attend_by_blocks, torch.device("cuda"), torch.bfloat16, 64)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60)), min_size=1), st.integers(1, 5))
def test_cuts_between_ranks_are_starts_of_rows(shapes: list[tuple[int, int]], ranks: int):
    blocks: list[Block] = []
    for num_rows, length in shapes:
        blocks.append(Block(blocks[-1].stop if blocks else 0, num_rows, length))
    cuts = row_cuts(blocks, ranks)
    assert len(cuts) == ranks + 1 and (cuts[0], cuts[-1]) == (0, blocks[-1].stop)
    own = [blocks_between(blocks, *pair) for pair in pairwise(cuts)]
    for pair, found in zip(pairwise(cuts), own, strict=True):
        assert sum(block.num_rows * block.length for block in found) == pair[1] - pair[0]
    rows = [(at, b.length) for b in blocks for at in range(b.start, b.stop, b.length)]
    again = [(at, b.length) for f in own for b in f for at in range(b.start, b.stop, b.length)]
    assert again == rows


def test_ranks_get_about_as_many_tokens_each():
    assert row_cuts((Block(0, 8, 10), Block(80, 1, 40)), 3) == (0, 40, 80, 120)
    assert row_cuts((Block(0, 1, 100),), 2) == (0, 0, 100)
