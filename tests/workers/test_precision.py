"""What must stay in float32 in a network of bfloat16, under every strategy."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.model import LoraSpec
from skyrl_actors.workers.base_model import BaseModel
from tests.workers import strategy_runs, tiny_models, vision_models
from tests.workers.ranks import Ranks
from tests.workers.references import Reference
from tests.workers.strategy_runs import STRATEGIES


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *product(("qwen3", "gemma3", "gpt-oss"), ("zero1", "zero3", "fsdp2")),
        ("qwen3_vl", "fsdp2"),  # DeepSpeed trains no model with a vision tower
    ],
)
def test_constants_equal_those_of_the_whole_model(
    ranks: dict[int, Ranks], tmp_path: Path, name: str, strategy: str, lora: LoraSpec | None
):
    """Rounded rotary frequencies turn by a wrong angle, which grows with the position."""
    if name in vision_models.MODELS:
        base = vision_models.make(name, tmp_path / "base")
    else:
        base = tiny_models.make(name, tmp_path / "base")
    whole = BaseModel(str(base), torch.bfloat16, torch.device("cpu")).module
    wanted = dict(whole.named_buffers())
    (found,) = ranks[1].run(strategy_runs.constants, str(base), STRATEGIES[strategy], lora)
    assert found.keys() == wanted.keys() and any("inv_freq" in one for one in wanted)
    for one, values in wanted.items():
        # FSDP2 makes a trained model in float32, and layers round a scale when they use it.
        assert found[one].dtype.itemsize >= values.dtype.itemsize, one
        assert torch.equal(found[one].to(values.dtype), values), one


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("strategy", ["replica", "zero1", "zero3", "fsdp2"])
def test_values_of_full_critics_are_not_rounded(
    ranks: dict[int, Ranks], tmp_path: Path, strategy: str, count: int
):
    """With 8 bits, values near 20 would be whole eighths."""
    base = tiny_models.make("qwen3", tmp_path / "base")
    rng = np.random.default_rng(0)
    size = 200
    row = Example(
        rng.integers(0, 128, size).astype(np.int32),
        {
            "weights": np.ones(size, np.float32),
            "values": np.zeros(size, np.float32),
            "returns": np.zeros(size, np.float32),
        },
    )
    columns = columns_from([row])
    reference = Reference(base, torch.linspace(-0.3, 0.3, 48).view(1, -1))
    assert reference.value_bias is not None
    reference.value_bias.data += 20.0
    with torch.no_grad():
        exact = torch.cat(reference.rows(columns)).numpy()
    answers = ranks[count].run(strategy_runs.large_values, str(base), STRATEGIES[strategy], columns)
    found = next(one for one in answers if len(one))[:size]
    # The layers themselves are in bfloat16.
    assert np.abs(found - exact).max() < 0.06
    assert len(set(found.tolist())) > 150
