"""HSDP: two copies of the weights, each sharded over two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_actors.config.groups import GroupConfig
from skyrl_actors.config.strategies import Fsdp2Strategy
from skyrl_actors.messages.model import AdamParams
from skyrl_actors.workers.sharded_files import ShardedFiles
from skyrl_actors.workers.state import adam_group
from skyrl_actors.workers.tensor_files import whole
from tests.workers import strategy_runs as runs
from tests.workers.ranks import Ranks
from tests.workers.references import Reference, batch
from tests.workers.strategy_runs import STRATEGIES
from tests.workers.tiny_models import make

pytestmark = pytest.mark.slow
STEPS = 5
ADAMS = [
    AdamParams(
        learning_rate=1e-3, eps=1e-3, weight_decay=0.1, grad_clip_norm=3.0 if step % 2 else 0.0
    )
    for step in range(STEPS)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def four():
    made = Ranks(4, timeout_s=120.0)
    yield made
    made.close()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())  # of the Frobenius norms


@pytest.mark.parametrize(
    ("strategy", "dtype", "bound"),
    [
        (Fsdp2Strategy(shard_ranks=2), "float32", 1e-3),
        (Fsdp2Strategy(shard_ranks=1), "float32", 1e-3),
        (Fsdp2Strategy(shard_ranks=2), "bfloat16", 0.25),
        (Fsdp2Strategy(shard_ranks=2, gradient_dtype="bfloat16"), "float32", 0.1),
        (Fsdp2Strategy(gradient_dtype="bfloat16"), "bfloat16", 0.25),
    ],
    ids=["2x2", "4x1", "2x2 bfloat16", "2x2 sent in bfloat16", "1x4 sent in bfloat16"],
)
def test_adamw_equals_torch(
    four: Ranks, base: Path, strategy: Fsdp2Strategy, dtype: str, bound: float
):
    """The second call of each step leaves some ranks without a row."""
    data = [
        batch(100 + step, (9, 4, 17) if step % 2 else (9, 4, 17, 6, 8)) for step in range(STEPS)
    ]
    reference = Reference(base)
    start = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    optimizer = torch.optim.AdamW(reference.model.parameters())
    norms = []
    for columns, adam in zip(data, ADAMS, strict=True):
        reference.clear()
        reference.backward("cross_entropy", columns)
        limit = adam.grad_clip_norm or torch.inf
        clipped = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), limit)
        norms.append(float(clipped))
        optimizer.param_groups[0].update(adam_group(adam))
        optimizer.step()
    arguments = (str(base), strategy, data, ADAMS, {"dtype": dtype})
    found = four.run(runs.trajectory, *arguments)
    weights, measured = found[0]
    exact = dtype == "float32" and strategy.gradient_dtype == "float32"
    assert measured == pytest.approx(norms, rel=1e-5 if exact else 0.05)
    for other in found[1:]:
        assert other[1] == measured  # the copies stay equal
    for name, parameter in reference.model.named_parameters():
        moved = parameter.detach() - start[name]
        apart = relative(weights[name].double() - start[name], moved)
        assert apart < bound, (name, apart)


def test_a_snapshot_has_one_copy_and_is_restored_on_other_ranks(
    four: Ranks, ranks: dict[int, Ranks], base: Path, tmp_path: Path
):
    data, folder = [batch(50 + i, (9, 4, 17, 6)) for i in range(3)], str(tmp_path)
    hybrid, options = Fsdp2Strategy(shard_ranks=2), dict[str, Any]()
    made = four.run(runs.snapshot_and_go_on, str(base), hybrid, data, folder, options)
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("shard-*"))]
    assert len(sizes) == 4 and max(sizes[2:]) < 0.1 * min(sizes[:2])  # the second copy is not there
    arguments: Any = (runs.restore_and_go_on, str(base))
    ends: Any = (data[-1], folder, options)
    for group, strategy in ((four, hybrid), (ranks[2], Fsdp2Strategy()), (ranks[1], "replica")):
        chosen = STRATEGIES["replica"] if strategy == "replica" else strategy
        restored, found = group.run(*arguments, chosen, *ends)[0]
        with ShardedFiles(sorted(tmp_path.glob("shard-*"))) as files:
            for name, tensor in restored.items():
                assert torch.equal(whole(files.vector("weights"), name), tensor), name
        for name, tensor in made[0][0].items():
            assert relative(found[name], tensor.double()) < 1e-5


def test_copies_must_fill_the_group():
    with pytest.raises(ValueError, match="shard_ranks 3 does not divide num_ranks 4"):
        GroupConfig(num_ranks=4, full_strategy=Fsdp2Strategy(shard_ranks=3))


def test_a_frozen_base_has_no_dtype_of_gradients():
    with pytest.raises(ValueError, match="has no effect: the frozen base"):
        GroupConfig(strategy=Fsdp2Strategy(gradient_dtype="bfloat16"))


def test_a_group_of_some_ranks_waits_no_longer_than_it_is_told(four: Ranks, base: Path):
    """Last in this file, because these ranks cannot compute together afterwards."""
    found = four.run(runs.late_in_group, str(base), 1.0)
    for seconds, error in found[::2]:  # the others do not come
        assert 0.5 < seconds < 10 and "timed out" in error.lower()
