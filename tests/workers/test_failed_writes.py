"""A rank that cannot write takes part to the end, so that the others do not wait for it."""

from pathlib import Path

import pytest

from tests.workers import strategy_runs, tiny_models
from tests.workers.ranks import Ranks
from tests.workers.strategy_runs import STRATEGIES


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp2"])
def test_a_full_disk_fails_a_save_and_no_other_rank(
    ranks: dict[int, Ranks], tmp_path: Path, strategy: str
):
    """The rank that wrote left the others in a collective until their deadline."""
    base = tiny_models.make("qwen3-wide", tmp_path / "base")
    folder = tmp_path / "saved"
    first, second = ranks[2].run(
        strategy_runs.saved_on_full_disk, str(base), STRATEGIES[strategy], str(folder)
    )
    assert "File too large" in first[0] and "directory" in first[0].lower() and second[0] == ""
    assert max(first[1], second[1]) < 30.0
    assert (folder / "saved_by").read_text() == "r2"
