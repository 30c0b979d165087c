"""Every strategy, at one and two ranks, against float64 transformers on one process."""

from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers.isolation import ALLOWED
from skyrl_actors.workers.state import adam_group
from skyrl_actors.workers.tensor_files import TensorFiles, whole
from tests.workers import strategy_runs as runs
from tests.workers import stream_runs
from tests.workers.ranks import Ranks
from tests.workers.references import Reference, batch, inputs_of, relative
from tests.workers.strategy_runs import STRATEGIES
from tests.workers.tiny_models import make

POLICY_LOSSES = sorted(
    name
    for name, entry in losses.REGISTRY.items()
    if entry.role == "policy" and not entry.any_inputs
)
DTYPES = ("float32", "bfloat16")
# ZeRO 1 differs from 2 in one setting of DeepSpeed. JAX has its own fast tests.
EACH = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("zero1", "jax") else name
    for name in STRATEGIES
]
JAX = pytest.param("jax", marks=pytest.mark.slow)
# For tests in which the dtype changes little.
BOTH_IF_SLOW = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
# Of a gradient, relative to float64. Most of it is the rounding of the base's weights.
BFLOAT16_ERROR = 0.1
# The clipping of PPO makes its gradient jump where the ratio crosses a bound. In bfloat16 a logprob
# is off by up to 0.05, which clips another token: one of 20 changes the gradient by 0.2. Which
# token depends on the processor. The loss for bfloat16 has no bound.
TENANT_LOSS = {"float32": "ppo", "bfloat16": "importance_sampling"}
# In the second, one of two ranks gets no row.
RAGGED = ((3, 30, 7, 7, 21, 2, 50), (40,), (5, 5, 5))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


def data_for(name: str) -> list:
    return [
        batch(10 + i, lengths, inputs_of(name), losses.REGISTRY[name].role == "policy")
        for i, lengths in enumerate(RAGGED)
    ]


@pytest.fixture(scope="module")
def expected(base: Path) -> dict:
    found = {}
    for name in [*POLICY_LOSSES, "ppo_critic"]:
        head = torch.linspace(-0.3, 0.3, 48).view(1, -1) if name == "ppo_critic" else None
        reference = Reference(base, head)
        totals = [reference.backward(name, columns) for columns in data_for(name)]
        with torch.no_grad():
            rows = [torch.cat(reference.rows(columns)).numpy() for columns in data_for(name)]
        found[name] = reference.gradients(), totals, rows
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("strategy", EACH)
def test_gradients_of_every_loss_over_three_ragged_calls(
    ranks: dict[int, Ranks], base: Path, expected: dict, strategy: str, world_size: int
):
    for role, names in (("policy", POLICY_LOSSES), ("critic", ["ppo_critic"])):
        data = {name: data_for(name) for name in names}
        found = ranks[world_size].run(
            runs.gradients_of_losses, str(base), STRATEGIES[strategy], data, {"role": role}
        )
        for name in names:
            wanted, totals, rows = expected[name]
            gradients, norm, _ = found[0][name]
            assert gradients.keys() == wanted.keys()
            for key, gradient in gradients.items():
                assert relative(gradient, wanted[key]) < 1e-5, (name, key)
            whole = float(torch.stack([g.norm() for g in wanted.values()]).norm())
            assert norm == pytest.approx(whole, rel=1e-5)
            for i, columns in enumerate(data[name]):
                outputs = [of_rank[name][2][i] for of_rank in found]
                np.testing.assert_allclose(
                    runs.values_in_order(columns, outputs), rows[i], atol=2e-5
                )
                assert sum(sums.get("loss:sum", 0.0) for _, _, sums in outputs) == pytest.approx(
                    totals[i], rel=1e-5, abs=1e-4
                )


@pytest.mark.parametrize("strategy", EACH)
def test_gradients_in_bfloat16(ranks: dict[int, Ranks], base: Path, expected: dict, strategy: str):
    for role, names in (("policy", ["cross_entropy", "gspo"]), ("critic", ["ppo_critic"])):
        data = {name: data_for(name) for name in names}
        options = {"role": role, "dtype": "bfloat16"}
        found = ranks[2].run(
            runs.gradients_of_losses, str(base), STRATEGIES[strategy], data, options
        )
        for name in names:
            wanted, _, rows = expected[name]
            gradients, norm, _ = found[0][name]
            assert relative(joined(gradients), joined(wanted)) < BFLOAT16_ERROR, name
            assert norm == pytest.approx(float(joined(wanted).norm()), rel=BFLOAT16_ERROR), name
            for i, columns in enumerate(data[name]):
                values = runs.values_in_order(columns, [of_rank[name][2][i] for of_rank in found])
                assert np.abs(values - rows[i]).mean() < 0.05, name


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        pytest.param(1, "float32", marks=pytest.mark.slow),
        (2, "float32"),
        pytest.param(2, "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("strategy", EACH)
def test_adamw_over_twenty_steps(
    ranks: dict[int, Ranks], base: Path, strategy: str, world_size: int, dtype: str
):
    """Every field of every call applies. The reference is torch.optim.AdamW in float64."""
    data = [batch(100 + step, (9, 4, 17)) for step in range(20)]
    adams = [
        AdamParams(
            learning_rate=1e-4 * (1 + step % 3),
            beta1=0.9 - 0.01 * step,
            beta2=0.95,
            eps=1e-3,
            weight_decay=20.0 * (step % 2),
            grad_clip_norm=3.0 if step % 4 == 3 else 0.0,
            decay_vectors=step % 3 != 0,
        )
        for step in range(20)
    ]
    reference = Reference(base)
    parameters = list(reference.model.parameters())
    vectors = [p for p in parameters if p.dim() == 1]
    assert vectors
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1]}])
    optimizer.add_param_group({"params": vectors})
    norms = []
    for columns, adam in zip(data, adams, strict=True):
        reference.clear()
        reference.backward("cross_entropy", columns)
        norms.append(
            float(
                torch.nn.utils.clip_grad_norm_(
                    reference.model.parameters(), adam.grad_clip_norm or torch.inf
                )
            )
        )
        for group in optimizer.param_groups:
            group.update(adam_group(adam))
        if not adam.decay_vectors:
            optimizer.param_groups[1]["weight_decay"] = 0.0
        optimizer.step()
    arguments = (str(base), STRATEGIES[strategy], data, adams, {"dtype": dtype})
    weights, found = ranks[world_size].run(runs.trajectory, *arguments)[0]
    assert found == pytest.approx(norms, rel=1e-5 if dtype == "float32" else BFLOAT16_ERROR)
    for name, parameter in reference.model.named_parameters():
        assert relative(weights[name], parameter.detach()) < (
            1e-6 if dtype == "float32" else 2e-3
        ), name


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", EACH)
def test_a_step_without_a_gradient_equals_a_step_with_zeros(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str
):
    """Moments and weight decay apply, as in float64.

    The call of one row leaves one of two ranks without a gradient of its own.
    """
    data = [None, batch(1, (9, 4, 17)), None, batch(2, (13,)), None, None]
    adam = AdamParams(learning_rate=1e-3, eps=1.0, weight_decay=0.1)
    reference = Reference(base)
    optimizer = torch.optim.AdamW(reference.model.parameters(), **adam_group(adam))
    norms = []
    for columns in data:
        reference.clear()
        if columns is not None:
            reference.backward("cross_entropy", columns)
        for parameter in reference.model.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.model.parameters(), torch.inf)))
        optimizer.step()
    arguments = (str(base), STRATEGIES[strategy], data, [adam] * len(data), {"dtype": dtype})
    weights, found = ranks[2].run(runs.trajectory, *arguments)[0]
    _, of_critic = ranks[2].run(
        runs.trajectory, *arguments[:2], [None], [adam], {"dtype": dtype, "role": "critic"}
    )[0]
    assert of_critic == [0.0]
    assert found == pytest.approx(norms, rel=1e-5 if dtype == "float32" else 0.05)
    for name, parameter in reference.model.named_parameters():
        assert relative(weights[name], parameter.detach()) < (
            1e-6 if dtype == "float32" else 5e-4
        ), name


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp2"])
def test_bfloat16_computes_with_float32_master_weights(
    ranks: dict[int, Ranks], base: Path, strategy: str
):
    """A step far below the resolution of bfloat16 changes the weights."""
    data, adams = [batch(1, (9, 4, 17))], [AdamParams(learning_rate=1e-6, eps=1e-8)]
    weights, _ = ranks[2].run(
        runs.trajectory, str(base), STRATEGIES[strategy], data, adams, {"dtype": "bfloat16"}
    )[0]
    same, _ = ranks[1].run(
        runs.trajectory, str(base), ReplicaStrategy(), data, adams, {"dtype": "bfloat16"}
    )[0]
    with TensorFiles(base) as files:
        for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
            start = whole(files, name)
            moved = (weights[name] - start).abs().median()
            assert 0.5e-6 < moved < 1.1e-6, name
            assert torch.allclose(weights[name], same[name], atol=2.1e-6)


SAVED = [
    ("zero3", "replica"),
    ("fsdp2", "zero1"),
    ("zero1", "fsdp2"),
    ("replica", "zero3"),
    ("zero2", "zero2"),
    pytest.param("replica", "jax", marks=pytest.mark.slow),
    pytest.param("jax", "fsdp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize(("saver", "loader"), SAVED)
def test_a_checkpoint_of_two_ranks_continues_on_one_rank_with_another_strategy(
    ranks: dict[int, Ranks], base: Path, tmp_path: Path, saver: str, loader: str, dtype: str
):
    data, after = [batch(5 + i, (9, 4, 17)) for i in range(3)], batch(50, (12, 3, 8))
    folder = str(tmp_path / "saved")
    ranks[2].run(runs.train_and_save, str(base), STRATEGIES[saver], data, folder, {"dtype": dtype})
    other = [batch(77, (6, 5))]
    found = ranks[1].run(
        runs.load_and_step, str(base), STRATEGIES[loader], after, folder, other, {"dtype": dtype}
    )[0]
    same = ranks[2].run(
        runs.load_and_step, str(base), STRATEGIES[saver], after, folder, other, {"dtype": dtype}
    )[0]
    for name, weight in found.items():
        assert relative(weight, same[name]) < (1e-6 if dtype == "float32" else 2e-3), name


TENANTS = [
    ModelSpec(model_id="a", base_model="tiny", lora=LoraSpec(rank=4), seed=1),
    ModelSpec(model_id="b", base_model="tiny", lora=LoraSpec(rank=8, train_unembed=False), seed=2),
    ModelSpec(model_id="c", base_model="tiny", lora=LoraSpec(rank=2, train_mlp=False), seed=3),
]


@pytest.fixture(scope="module")
def of_tenants(ranks: dict[int, Ranks], base: Path) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Return, for each dtype's loss, each tenant alone on one rank, in float64.

    The rounding of float32 differs between kinds of processors.
    """
    found: dict[str, list] = {dtype: [] for dtype in DTYPES}
    for dtype, loss in TENANT_LOSS.items():
        for i, spec in enumerate(TENANTS):
            data = [[calls[i]] for calls in tenant_data()]
            options = {"dtype": "float64"}
            found[dtype] += ranks[1].run(
                runs.tenants, str(base), ReplicaStrategy(), [spec], data, loss, options
            )[0]
    return found


def joined(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def tenant_arguments(dtype: str) -> tuple[list[ModelSpec], list, str]:
    return TENANTS, tenant_data(), TENANT_LOSS[dtype]


def tenant_data() -> list:
    return [
        [
            batch(10 * step + i, lengths, ("logprobs", "advantages"))
            for i, lengths in enumerate(((9, 4, 17), (5,), (12, 3, 30)))
        ]
        for step in range(3)
    ]


@pytest.mark.parametrize("strategy", ["replica", "zero3", "fsdp2", JAX])
@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
def test_adapters_over_a_frozen_base_in_every_strategy(
    ranks: dict[int, Ranks], base: Path, of_tenants: dict, strategy: str, budget: int, dtype: str
):
    """Tenants that share passes on two ranks equal each tenant alone.

    One of the ranks has fewer passes.
    """
    options = {"budget": budget, "dtype": dtype}
    found = ranks[2].run(
        runs.tenants, str(base), STRATEGIES[strategy], *tenant_arguments(dtype), options
    )[0]
    for ours, alone in zip(found, of_tenants[dtype], strict=True):
        assert relative(joined(ours), joined(alone)) < (
            5e-6 if dtype == "float32" else BFLOAT16_ERROR
        )


@pytest.mark.parametrize("strategy", ["replica", "fsdp2"])
@pytest.mark.parametrize("activations", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_two_ranks_share_the_tokens_of_a_sequence(
    ranks: dict[int, Ranks],
    base: Path,
    expected: dict,
    of_tenants: dict,
    strategy: str,
    activations: str,
):
    """Losses of tokens and rows, full fine-tunes, critics and adapters, with odd lengths."""
    options = {"sequence_parallel": 2, "activations": activations}
    for role, names in (("policy", ["cross_entropy", "gspo"]), ("critic", ["ppo_critic"])):
        data = {name: data_for(name) for name in names}
        found = ranks[2].run(
            runs.gradients_of_losses,
            str(base),
            STRATEGIES[strategy],
            data,
            options | {"role": role},
        )
        for name in names:
            wanted, totals, rows = expected[name]
            for key, gradient in found[0][name][0].items():
                assert relative(gradient, wanted[key]) < 1e-5, (name, key)
            for i, columns in enumerate(data[name]):
                outputs = [of_rank[name][2][i] for of_rank in found]
                np.testing.assert_allclose(
                    runs.values_in_order(columns, outputs), rows[i], atol=2e-5
                )
                assert outputs[0][2]["loss:sum"] == pytest.approx(totals[i], rel=1e-5, abs=1e-4)
    adapters = ranks[2].run(
        runs.tenants, str(base), STRATEGIES[strategy], *tenant_arguments("float32"), options
    )[0]
    for ours, alone in zip(adapters, of_tenants["float32"], strict=True):
        assert relative(joined(ours), joined(alone)) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replica", "fsdp2"])
def test_two_ranks_share_the_tokens_of_a_sequence_in_bfloat16(
    ranks: dict[int, Ranks], base: Path, expected: dict, of_tenants: dict, strategy: str
):
    options = {"sequence_parallel": 2, "dtype": "bfloat16"}
    data = {"cross_entropy": data_for("cross_entropy")}
    found = ranks[2].run(runs.gradients_of_losses, str(base), STRATEGIES[strategy], data, options)[
        0
    ]
    assert (
        relative(joined(found["cross_entropy"][0]), joined(expected["cross_entropy"][0]))
        < BFLOAT16_ERROR
    )
    adapters = ranks[2].run(
        runs.tenants, str(base), STRATEGIES[strategy], *tenant_arguments("bfloat16"), options
    )[0]
    for ours, alone in zip(adapters, of_tenants["bfloat16"], strict=True):
        assert relative(joined(ours), joined(alone)) < BFLOAT16_ERROR


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", ["replica", "fsdp2"])
@pytest.mark.parametrize("name", ["qwen3-moe", "llama", "gemma3"])
def test_other_architectures_on_two_ranks(
    ranks: dict[int, Ranks], tmp_path: Path, strategy: str, name: str, dtype: str
):
    """Experts, whose files have another layout than their modules; an untied head; windows."""
    base = make(name, tmp_path)
    calls = data_for("cross_entropy")
    found = ranks[2].run(
        runs.gradients_of_losses,
        str(base),
        STRATEGIES[strategy],
        {"cross_entropy": calls},
        {"dtype": dtype},
    )
    reference = Reference(base)
    for columns in calls:
        reference.backward("cross_entropy", columns)
    wanted, gradients = reference.gradients(), found[0]["cross_entropy"][0]
    if dtype == "bfloat16":
        assert relative(joined(gradients), joined(wanted)) < BFLOAT16_ERROR
        return
    for key, gradient in gradients.items():
        assert relative(gradient, wanted[key]) < 1e-5, key


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", EACH)
def test_moving_parts_away_and_back_changes_no_number(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str
):
    data = [batch(5 + i, (9, 4, 17)) for i in range(2)]
    moved, stayed = (
        ranks[2].run(
            runs.moved_about, str(base), STRATEGIES[strategy], data, moves, {"dtype": dtype}
        )[0]
        for moves in (True, False)
    )
    for name, weight in moved.items():
        assert torch.equal(weight, stayed[name]), name


# Torch's meta device stands for another device than the host. Parameters that are views cannot move
# there, nor can the parts that DeepSpeed moves by itself.
MOVED = {
    "replica": ["optimizer", "gradients"],
    "fsdp2": ["optimizer", "gradients", "weights"],
    "zero1": ["gradients"],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", MOVED)
def test_pending_gradients_move_to_a_device_other_than_the_host(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str
):
    parts = MOVED[strategy]
    for found in ranks[2].run(
        runs.moved_away,
        str(base),
        STRATEGIES[strategy],
        batch(5, (9, 4, 17)),
        parts,
        {"dtype": dtype},
    ):
        assert found == {part: ["meta"] for part in parts}


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", EACH)
def test_a_gradient_that_is_not_finite_changes_no_weight(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str
):
    for error_text, before, after in ranks[2].run(
        runs.gradients_that_are_not_finite,
        str(base),
        STRATEGIES[strategy],
        batch(5, (9, 4, 17)),
        {"dtype": dtype},
    ):
        assert "the step was not applied" in error_text
        assert all(
            bool(torch.isfinite(weight).all()) and not torch.equal(weight, before[name])
            for name, weight in after.items()
        )


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", EACH)
def test_a_dropped_call_leaves_no_gradient(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str
):
    first, second = batch(5, (9, 4, 17)), batch(6, (8, 3, 20))
    arguments = (str(base), STRATEGIES[strategy], first, second)
    norms = [
        ranks[2].run(runs.dropped, *arguments, drop, {"dtype": dtype})[0] for drop in (True, False)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize(
    ("strategy", "options"), [("zero3", {}), ("fsdp2", {}), ("replica", {"sequence_parallel": 2})]
)
def test_ranks_whose_tenants_train_other_layers_do_not_wait_for_each_other(
    ranks: dict[int, Ranks], base: Path, strategy: str, options: dict, dtype: str
):
    """In each of three rounds, every tenant gets its rows on one rank and then on the other."""
    columns = [batch(i, (20 + i, 9)) for i in range(3)]
    found = ranks[2].run(
        runs.apart, str(base), STRATEGIES[strategy], columns, {**options, "dtype": dtype}
    )[0]
    alone = ranks[1].run(runs.apart, str(base), ReplicaStrategy(), columns, {})[0]
    times = 1.0 if options else 2.0
    for ours, wanted in zip(found, alone, strict=True):
        assert relative(joined(ours), joined(wanted) * times) < (
            2e-6 if dtype == "float32" else BFLOAT16_ERROR
        )


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
@pytest.mark.parametrize("strategy", ["replica", "zero2", "fsdp2", JAX])
def test_a_part_that_one_rank_refuses_tears_its_model(
    ranks: dict[int, Ranks], base: Path, strategy: str, lora: LoraSpec | None, dtype: str
):
    """The other rank has added its rows, so the model is rebuilt on both from the journal.

    No rank waits for the other.
    """
    columns = batch(3, (9, 9), ("logprobs", "advantages"))
    columns.fields["logprobs"][3] = -1e9
    columns.fields["weights"][3] = 1.0
    (refused, other) = (
        o[0]
        for o in ranks[2].run(
            runs.refused_on_one, str(base), STRATEGIES[strategy], columns, lora, {"dtype": dtype}
        )
    )
    assert {refused[0] != "", other[0] != ""} == {True, False}
    error_text, clean = refused if refused[0] else other
    assert "datum 0" in error_text and not clean


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_a_rank_reads_its_own_part_of_the_base_model(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str
):
    found = ranks[2].run(runs.elements_read, str(base), STRATEGIES[strategy], {"dtype": dtype})
    # In this case, float32 weights are read in addition to the compute weights.
    again = 3 if (strategy, dtype) == ("zero3", "bfloat16") else 1
    assert sum(read for read, _ in found) == again * found[0][1]
    assert all(read <= 0.51 * again * size for read, size in found)


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", ["replica", "zero2", "zero3", "fsdp2", JAX])
def test_a_version_is_sent_from_live_weights_and_written_before_they_change(
    ranks: dict[int, Ranks], base: Path, tmp_path: Path, strategy: str, dtype: str
):
    """Ranks that hold shards gather them while one rank sends."""
    for checks in ranks[2].run(
        stream_runs.sent_from_the_weights,
        str(base),
        STRATEGIES[strategy],
        batch(5, (9, 4, 17)),
        str(tmp_path),
        {"dtype": dtype},
    ):
        assert all(checks.values()), checks


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize("strategy", ["replica", "zero2", "zero3", "fsdp2"])
def test_each_rank_sends_shards_to_its_own_engine(
    ranks: dict[int, Ranks], base: Path, strategy: str, dtype: str, tmp_path: Path
):
    for checks in ranks[2].run(
        stream_runs.sent_by_every_rank,
        str(base),
        STRATEGIES[strategy],
        batch(5, (9, 4, 17)),
        str(tmp_path),
        {"dtype": dtype},
    ):
        assert all(checks.values()), checks


@pytest.mark.parametrize("dtype", BOTH_IF_SLOW)
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, id="full"),
        pytest.param(LoraSpec(rank=4), id="lora", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("strategy", ["replica", "zero3", "fsdp2"])
def test_activations_are_offloaded_and_weights_are_not(
    ranks: dict[int, Ranks], base: Path, strategy: str, lora: LoraSpec | None, dtype: str
):
    arguments = (str(base), STRATEGIES[strategy], batch(3, (30, 21)), lora)
    options = {"dtype": dtype, "budget": 64}
    sent, of_weights, gradients = ranks[2].run(
        runs.offloaded, *arguments, {**options, "activations": "offload"}
    )[0]
    assert sent > 0 and of_weights == 0
    none, _, kept = ranks[2].run(runs.offloaded, *arguments, options)[0]
    assert none == 0
    for name, gradient in gradients.items():
        assert torch.equal(gradient, kept[name]), name


SHARDED = [
    pytest.param("zero1", {}, marks=pytest.mark.slow),
    ("zero3", {}),
    ("fsdp2", {}),
    ("replica", {"sequence_parallel": 2}),
    pytest.param("fsdp2", {"activations": "recompute"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "options"), SHARDED)
def test_the_check_of_packed_rows_runs_on_all_ranks(
    ranks: dict[int, Ranks], base: Path, tmp_path: Path, strategy: str, options: dict
):
    for dtype in ("float32", "bfloat16"):
        asked = options | {"dtype": dtype}
        for found in ranks[2].run(runs.proved, str(base), STRATEGIES[strategy], asked):
            assert not isinstance(found, str), found
            assert (
                found.leak == 0 and found.gradients < ALLOWED[getattr(torch, dtype)].gradients / 4
            )
    wrong = str(make("deepseek-v3.2", tmp_path / "wrong"))
    for found in ranks[2].run(runs.proved, wrong, STRATEGIES[strategy], options):
        assert isinstance(found, str)
        assert found.startswith("DeepseekV32ForCausalLM cannot be trained here"), found
