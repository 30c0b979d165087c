"""Families with states, latent attention and routers, over ranks and for several tenants."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.buffers import fill_buffers, stored_buffers
from skyrl_actors.workers.meta_model import shell
from skyrl_actors.workers.network import PassInputs, Segment, segments_within
from skyrl_actors.workers.tensor_files import InMemory
from tests.workers import family_runs
from tests.workers.ranks import Ranks
from tests.workers.references import Reference, batch, relative
from tests.workers.strategy_runs import STRATEGIES
from tests.workers.tiny_models import make

LENGTHS = (5, 23, 9, 9, 1)  # ranks get different numbers of rows and of lengths


WITH_A_STATE = ("qwen3-next", "falcon-h1")
CASES = [
    *itertools.product(WITH_A_STATE, ("replica", "zero2", "fsdp2")),
    *itertools.product(("deepseek-v3",), ("replica", "zero2", "zero3", "fsdp2")),
    # DeepSpeed knows the blocks of these by name
    *itertools.product(("qwen2-moe", "qwen3-moe"), ("zero3", "fsdp2")),
]
FAST = (
    ("falcon-h1", "fsdp2"),
    ("deepseek-v3", "zero3"),
    ("qwen3-moe", "zero3"),
)


@pytest.mark.parametrize("activations", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_ranks_compute_what_each_row_is_alone(
    ranks: dict[int, Ranks], name: str, strategy: str, activations: str, tmp_path: Path
):
    base, columns = make(name, tmp_path / "base"), batch(3, LENGTHS)
    reference = Reference(base)
    reference.backward("cross_entropy", columns)
    wanted = [row.detach().numpy() for row in reference.rows(columns)]
    options = {"activations": activations}
    found = ranks[2].run(
        family_runs.full_gradient, str(base), STRATEGIES[strategy], columns, options
    )
    rows = {**found[0][0], **found[1][0]}
    assert sorted(rows) == list(range(len(LENGTHS)))
    for row, values in rows.items():
        np.testing.assert_allclose(values, wanted[row], atol=1e-5)
    gradients = reference.gradients()
    assert found[0][1]
    for key, gradient in found[0][1].items():
        assert relative(gradient, gradients[key]) < 1e-4, key


def test_zero_3_refuses_layers_with_a_state(ranks: dict[int, Ranks], tmp_path: Path):
    base, columns = make("lfm2", tmp_path / "base"), batch(3, LENGTHS)
    with pytest.raises(AssertionError, match="deepspeed stage 3 cannot train Lfm2ForCausalLM"):
        ranks[2].run(family_runs.full_gradient, str(base), STRATEGIES["zero3"], columns, {})


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_adapters_of_two_tenants_inside_a_layer_with_a_state(activations: str, tmp_path: Path):
    """The block of two rows of nine tokens has one row of each tenant."""
    base = BaseModel(
        str(make("minimax", tmp_path / "base")), torch.float32, torch.device("cpu"), activations
    )
    name = "model.layers.0.self_attn.qkv_proj"
    layer, generator = base.terms[name], torch.Generator().manual_seed(5)

    def adapter() -> dict[str, torch.Tensor]:
        a = torch.randn(4, layer.in_features, generator=generator) * 0.1
        b = torch.randn(layer.out_features, 4, generator=generator) * 0.1
        return {f"{name}.lora_A": a.requires_grad_(), f"{name}.lora_B": b.requires_grad_()}

    first, second = adapter(), adapter()
    rows = [(5, first), (9, first), (9, second), (23, second)]
    tokens = torch.randint(0, 128, (46,), generator=generator)
    targets = torch.randint(0, 128, (46,), generator=generator)

    def computed(start: int, blocks: tuple[Block, ...], segments: tuple[Segment, ...]) -> list:
        size = sum(block.num_rows * block.length for block in blocks)
        own = slice(start, start + size)
        positions = [torch.arange(b.length).repeat(b.num_rows) for b in blocks]
        inputs = PassInputs(
            tokens=tokens[own],
            positions=torch.cat(positions),
            blocks=blocks,
            segments=segments,
            targets=targets[own],
            counted=None,
        )
        leaves = [tensor for each in (first, second) for tensor in each.values()]
        with base.in_use(segments):
            logprobs = base.predict(inputs)[0]
            gradients = torch.autograd.grad(logprobs.sum(), leaves, allow_unused=True)
        found = [
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
        ]
        return [logprobs.detach(), *found]

    together = computed(
        0,
        (Block(0, 1, 5), Block(5, 2, 9), Block(23, 1, 23)),
        (Segment(14, first, 2.0), Segment(32, second, 0.5)),
    )
    start, alone = 0, []
    for length, views in rows:
        segment = Segment(length, views, 2.0 if views is first else 0.5)
        alone.append(computed(start, (Block(0, 1, length),), (segment,)))
        start += length
    torch.testing.assert_close(
        together[0], torch.cat([each[0] for each in alone]), atol=1e-6, rtol=0
    )
    for index in range(1, 5):
        wanted = sum(each[index] for each in alone)
        assert relative(together[index], wanted) < 1e-5 and wanted.abs().max() > 0


def test_the_segments_of_a_block():
    segments = (Segment(14, {}, 2.0), Segment(32, {}, 0.5))
    assert segments_within(segments, 5, 23) == (Segment(9, {}, 2.0), Segment(9, {}, 0.5))
    assert segments_within(segments, 0, 5) == (Segment(5, {}, 2.0),)
    assert segments_within(segments, 14, 46) == (Segment(32, {}, 0.5),)


@pytest.mark.parametrize("lengths", [LENGTHS, (23,)])  # one row: a rank has none
@pytest.mark.parametrize(
    ("name", "strategy", "activations"),
    [
        ("qwen3-next", "replica", "keep"),
        ("lfm2", "fsdp2", "recompute"),
        pytest.param("falcon-h1", "fsdp2", "keep", marks=pytest.mark.slow),
        pytest.param("nemotron-h", "replica", "recompute", marks=pytest.mark.slow),
        pytest.param("minimax", "fsdp2", "recompute", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_split_rows_give_layers_with_a_state_whole_rows(
    ranks: dict[int, Ranks],
    name: str,
    strategy: str,
    activations: str,
    lengths: tuple[int, ...],
    tmp_path: Path,
):
    base, columns = make(name, tmp_path / "base"), batch(3, lengths)
    reference = Reference(base)
    reference.backward("cross_entropy", columns)
    options = {"activations": activations, "sequence_parallel": 2, "budget": 64}
    found = ranks[2].run(
        family_runs.full_gradient, str(base), STRATEGIES[strategy], columns, options
    )
    for row, wanted in enumerate(reference.rows(columns)):
        np.testing.assert_allclose(found[0][0][row], wanted.detach().numpy(), atol=1e-5)
    gradients = reference.gradients()
    for key, gradient in found[0][1].items():
        assert relative(gradient, gradients[key]) < 1e-4, key


def test_router_corrections_of_a_sharded_network_stay_in_float32(tmp_path: Path):
    folder = str(make("deepseek-v3", tmp_path / "base"))
    exact = stored_buffers(BaseModel(folder, torch.bfloat16, torch.device("cpu")).module)
    module = shell(folder, torch.bfloat16)
    fill_buffers(module, InMemory(exact))
    assert exact and stored_buffers(module).keys() == exact.keys()
    for name, buffer in stored_buffers(module).items():
        assert buffer.dtype == exact[name].dtype == torch.float32, name
        assert torch.equal(buffer, exact[name]) and buffer.abs().max() > 0
