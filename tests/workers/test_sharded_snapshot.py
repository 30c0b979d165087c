"""Snapshots of sharded full fine-tunes: each rank writes its pieces, any ranks read them."""

from pathlib import Path

import pytest
import torch

from skyrl_actors.messages.errors import Corrupt
from skyrl_actors.workers.sharded_files import ShardedFiles, write_pieces
from skyrl_actors.workers.tensor_files import whole
from tests.workers import strategy_runs as runs
from tests.workers.ranks import Ranks
from tests.workers.references import batch
from tests.workers.strategy_runs import STRATEGIES
from tests.workers.tiny_models import make

SHAPES = {"a": (5, 3), "b": (2,), "c": (4,)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


def pieces_of(folder: Path) -> dict[str, torch.Tensor]:
    """Write tensors in pieces that overlap no row boundaries, and return them whole."""
    tensors = {"a": torch.arange(15.0).view(5, 3), "b": torch.tensor([7.0, 8.0])}
    tensors["c"] = torch.ones(4)
    parts = [
        [("a", 0, tensors["a"].view(-1)[:4]), ("c", 0, tensors["c"])],
        [("a", 4, tensors["a"].view(-1)[4:15]), ("b", 0, tensors["b"]), ("c", 4, torch.empty(0))],
    ]
    for rank, own in enumerate(parts):
        write_pieces(folder / f"shard-{rank}.safetensors", {"v": own}, SHAPES, {"steps": 3})
    return tensors


def test_pieces_are_read_in_any_ranges(tmp_path: Path):
    tensors = pieces_of(tmp_path)
    with ShardedFiles(sorted(tmp_path.glob("shard-*"))) as files:
        source = files.vector("v")
        assert source.shapes == SHAPES and files.facts == {"steps": 3}
        for name, tensor in tensors.items():
            assert torch.equal(whole(source, name), tensor)
        for start in range(16):
            for stop in range(start, 16):
                found = source.range("a", start, stop)
                assert torch.equal(found, tensors["a"].view(-1)[start:stop])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_file_is_an_error(tmp_path: Path, missing: int):
    pieces_of(tmp_path)
    (tmp_path / f"shard-{missing}.safetensors").unlink()
    with (
        ShardedFiles(sorted(tmp_path.glob("shard-*"))) as files,
        pytest.raises(Corrupt, match=r"no file has element \d+ of a \(15 elements\)"),
    ):
        whole(files.vector("v"), "a")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("strategy", "world", "other", "other_world"),
    [
        ("fsdp2", 2, "fsdp2", 2),
        ("fsdp2", 2, "zero1", 1),
        ("zero1", 2, "zero3", 2),
        ("zero2", 2, "replica", 1),
        ("zero3", 2, "fsdp2", 1),
        ("zero3", 2, "zero2", 2),
    ],
)
def test_a_snapshot_is_restored_by_any_strategy_and_number_of_ranks(
    ranks: dict[int, Ranks],
    base: Path,
    tmp_path: Path,
    dtype: str,
    strategy: str,
    world: int,
    other: str,
    other_world: int,
):
    data, folder = [batch(50 + i, (9, 4, 17, 6)) for i in range(3)], str(tmp_path)
    options = {"dtype": dtype}
    made = ranks[world].run(
        runs.snapshot_and_go_on, str(base), STRATEGIES[strategy], data, folder, options
    )
    wanted, _ = made[0]
    assert [gathers for _, gathers in made] == [0] * world  # nothing was gathered for the copy
    sizes = [file.stat().st_size for file in tmp_path.glob("shard-*")]
    assert len(sizes) == world and max(sizes) < 0.6 * sum(sizes)
    arguments = (runs.restore_and_go_on, str(base), STRATEGIES[other], data[-1], folder, options)
    restored, found = ranks[other_world].run(*arguments)[0]
    with ShardedFiles(sorted(tmp_path.glob("shard-*"))) as files:
        assert files.facts == {"num_steps": 2}
        for name, tensor in restored.items():
            assert torch.equal(whole(files.vector("weights"), name), tensor), name
    apart = float(sum((found[name] - wanted[name]).square().sum() for name in wanted)) ** 0.5
    step = float(sum((restored[name] - wanted[name]).square().sum() for name in wanted)) ** 0.5
    # Other strategies and numbers of ranks round gradients in another order.
    bound = 1e-3 if dtype == "float32" else 0.1
    assert apart == 0 if (strategy, world) == (other, other_world) else apart < bound * step
