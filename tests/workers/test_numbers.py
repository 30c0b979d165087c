"""One rank against plain PyTorch: losses, gradients, AdamW, LoRA against peft, and saved files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import (
    AdamParams,
    LoraSpec,
    LossCall,
    ModelSpec,
    OptimizerName,
    Role,
)
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, Refused, RowOutput, WorkerSpec
from skyrl_actors.workers.torch_worker import TorchWorker

LENGTHS = (5, 17, 9, 17, 30, 3, 9)


def worker_for(base: Path, role: Role = "policy", budget: int = 40, **options: Any) -> TorchWorker:
    worker = TorchWorker(
        WorkerSpec(
            role=role,
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype="float32",
            device="cpu",
            num_threads=2,
            microbatch_tokens=budget,
            collective_timeout_s=60.0,
            **options,
        )
    )
    worker.setup("127.0.0.1", 0)
    return worker


def computed(
    worker: TorchWorker,
    rows: tuple[int, ...],
    model_id: str,
    columns: Columns,
    loss: LossCall | None,
    forward_only: bool,
) -> RowOutput:
    (outcome,) = worker.forward_backward(
        (PartCall(model_id=model_id, rows=rows, columns=columns, loss=loss),), forward_only
    )
    if isinstance(outcome, Refused):
        raise outcome.error
    return outcome


def batch(seed: int, lengths: tuple[int, ...] = LENGTHS, extra: tuple[str, ...] = ()) -> Columns:
    rng = np.random.default_rng(seed)
    examples = []
    for n in lengths:
        fields: dict = {
            TARGETS: rng.integers(0, 256, n).astype(np.int32),
            "weights": rng.normal(0.5, 1, n).astype(np.float32),
        }
        fields |= {
            name: rng.normal(-5 if name == "logprobs" else 0, 0.5, n).astype(np.float32)
            for name in extra
        }
        examples.append(Example(rng.integers(0, 256, n).astype(np.int32), fields))
    return columns_from(examples)


def reference_logprobs(model: torch.nn.Module, columns: Columns) -> list[torch.Tensor]:
    """Compute one row at a time with transformers' own attention, without packing."""
    rows = []
    for i in range(columns.num_rows):
        where = columns.positions([i])
        logits = model(
            input_ids=torch.tensor(columns.tokens[where][None].astype(np.int64)), use_cache=False
        ).logits[0]
        targets = torch.tensor(columns.fields[TARGETS][where].astype(np.int64))
        rows.append(F.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    return rows


def reference_loss(name: str, logprobs: torch.Tensor, columns: Columns) -> torch.Tensor:
    f = {
        k: torch.tensor(v, dtype=logprobs.dtype) for k, v in columns.fields.items() if k != TARGETS
    }
    if name == "cross_entropy":
        return -(f["weights"] * logprobs).sum()
    ratio = torch.exp(logprobs - f["logprobs"])
    if name == "importance_sampling":
        return -(f["weights"] * ratio * f["advantages"]).sum()
    return -(
        f["weights"]
        * torch.minimum(ratio * f["advantages"], ratio.clamp(0.8, 1.2) * f["advantages"])
    ).sum()


def assert_same_gradients(worker: TorchWorker, model: torch.nn.Module) -> None:
    state = worker.models["m"].state
    assert state.gradients is not None
    gradients = state.split(state.gradients)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative(gradients[key], parameter.grad) < 1e-5, key


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_full_model_loss_and_gradient_against_float64(random_base: Path, name: str):
    extra = () if name == "cross_entropy" else ("logprobs", "advantages")
    columns = batch(1, extra=extra)
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    output = computed(
        worker, tuple(range(len(LENGTHS))), "m", columns, losses.find(name).checked({}), False
    )

    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float64)
    logprobs = torch.cat(reference_logprobs(model, columns))
    total = reference_loss(name, logprobs, columns)
    total.backward()
    np.testing.assert_allclose(output.values, logprobs.detach().numpy(), atol=2e-5)
    assert output.sums["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert_same_gradients(worker, model)


def test_many_targets_for_each_position_against_float64(random_base: Path):
    """Rows have 3, 1 and (N,) targets in one request, as from a teacher's distribution."""
    rng = np.random.default_rng(4)
    examples = []
    for n, shape in ((6, (6, 3)), (9, (9, 1)), (4, (4,))):
        fields: dict = {
            TARGETS: rng.integers(0, 256, shape),
            "weights": rng.uniform(0, 1, shape).astype(np.float32),
        }
        examples.append(Example(rng.integers(0, 256, n).astype(np.int32), fields))
    columns = columns_from(examples)
    assert columns.widths is not None and columns.widths.tolist() == [3, 1, 0]
    worker = worker_for(random_base, budget=10)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    output = computed(
        worker, (0, 1, 2), "m", columns, losses.find("cross_entropy").checked({}), False
    )

    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float64)
    total, rows = torch.zeros((), dtype=torch.float64), []
    for example in examples:
        logits = model(
            input_ids=torch.tensor(example.tokens[None].astype(np.int64)), use_cache=False
        ).logits[0]
        targets, weights = (
            torch.tensor(example.fields[name]).reshape(len(example.tokens), -1)
            for name in (TARGETS, "weights")
        )
        rows.append(F.log_softmax(logits, -1).gather(1, targets.long()))
        total = total - (weights.double() * rows[-1]).sum()
    total.backward()
    where = 0
    for row in rows:
        np.testing.assert_allclose(
            output.values[where : where + len(row), : row.shape[1]], row.detach().numpy(), atol=2e-5
        )
        where += len(row)
    assert output.sums["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert_same_gradients(worker, model)


def test_critic_loss_and_gradient_against_float64(random_base: Path):
    columns = batch(2, extra=("values", "returns"))
    columns = Columns(
        tokens=columns.tokens,
        offsets=columns.offsets,
        fields={k: v for k, v in columns.fields.items() if k != TARGETS},
    )
    worker = worker_for(random_base, "critic")
    worker.create_model(ModelSpec(model_id="c", base_model="tiny", role="critic"))
    head = torch.nn.Linear(192, 1, dtype=torch.float64)
    state = worker.models["c"].state
    with torch.no_grad():  # a head that is not zero, so that the trunk has a gradient
        state.views["value_head.weight"].copy_(head.weight)
        state.views["value_head.bias"].copy_(head.bias)
    output = computed(
        worker,
        tuple(range(len(LENGTHS))),
        "c",
        columns,
        LossCall("ppo_critic", {"value_clip": 0.2}),
        False,
    )

    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float64).model
    with torch.no_grad():
        head.weight.copy_(head.weight.float())
        head.bias.copy_(head.bias.float())
    values = torch.cat(
        [
            head(
                model(
                    input_ids=torch.tensor(
                        columns.tokens[columns.positions([i])][None].astype(np.int64)
                    )
                ).last_hidden_state[0]
            )[:, 0]
            for i in range(columns.num_rows)
        ]
    )
    f = {k: torch.tensor(v, dtype=torch.float64) for k, v in columns.fields.items()}
    bounded = torch.clamp(values, f["values"] - 0.2, f["values"] + 0.2)
    total = (
        0.5
        * f["weights"]
        * torch.maximum((values - f["returns"]) ** 2, (bounded - f["returns"]) ** 2)
    ).sum()
    total.backward()
    np.testing.assert_allclose(output.values, values.detach().numpy(), atol=2e-5)
    assert output.sums["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    assert state.gradients is not None
    gradients = state.split(state.gradients)
    assert head.weight.grad is not None
    assert relative(gradients["value_head.weight"], head.weight.grad) < 1e-5
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative(gradients[f"model.{key}"], parameter.grad) < 1e-5, key


@pytest.mark.parametrize("clip", [0.0, 3.0])
def test_adamw_after_accumulated_calls(random_base: Path, clip: float):
    """Run three forward_backward calls and a step, then a step with other hyperparameters.

    The reference is torch.optim.AdamW in float64 on the same gradients.
    """
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
    state = worker.models["m"].state
    parameter = torch.nn.Parameter(state.weights.double().clone())
    optimizer = torch.optim.AdamW([parameter])
    call = losses.find("cross_entropy").checked({})
    for step, adam in enumerate(
        [
            AdamParams(
                learning_rate=1e-2,
                beta1=0.9,
                beta2=0.95,
                eps=1e-12,
                weight_decay=0.0,
                grad_clip_norm=clip,
            ),
            AdamParams(
                learning_rate=3e-3,
                beta1=0.8,
                beta2=0.99,
                eps=1e-5,
                weight_decay=0.1,
                grad_clip_norm=clip,
            ),
        ]
    ):
        for k in range(3):
            computed(worker, tuple(range(len(LENGTHS))), "m", batch(10 * step + k), call, False)
        assert state.gradients is not None
        parameter.grad = state.gradients.double().clone()
        norm = torch.linalg.vector_norm(parameter.grad)
        if clip:
            parameter.grad.mul_(min(1.0, clip / float(norm)))
        optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        optimizer.step()
        metrics = worker.optim_step("m", adam)
        assert metrics["skyrl.ai/grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        np.testing.assert_allclose(
            state.weights.numpy(), parameter.detach().numpy(), rtol=1e-6, atol=1e-6
        )
        assert not state.gradients.any()


def test_a_step_without_gradient_is_tolerated(random_base: Path):
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
    before = worker.models["m"].state.weights.clone()
    assert worker.optim_step("m", AdamParams())["skyrl.ai/grad_norm"] == 0
    assert torch.equal(before, worker.models["m"].state.weights)


def test_a_gradient_that_is_not_finite_changes_nothing(random_base: Path):
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
    state = worker.models["m"].state
    before = state.weights.clone()
    state.ensure_gradients()[0] = torch.nan
    with pytest.raises(InvalidRequest, match="gradient norm is nan"):
        worker.optim_step("m", AdamParams())
    assert torch.equal(before, state.weights)
    assert worker.optim_step("m", AdamParams())["skyrl.ai/grad_norm"] == 0


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_a_gradient_that_float32_cannot_square_changes_nothing(
    random_base: Path, optimizer: OptimizerName
):
    """An infinite second moment would never let its weight move again."""
    worker = worker_for(random_base)
    lora = LoraSpec(rank=4)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora, optimizer=optimizer))
    state = worker.models["m"].state
    assert isinstance(state, FlatState)
    before = state.weights.clone()
    state.ensure_gradients()[0] = 1e25
    with pytest.raises(
        InvalidRequest, match=r"norm is 9.9.*e\+24: .*set adam_params\.grad_clip_norm"
    ):
        worker.optim_step("m", AdamParams())
    assert torch.equal(before, state.weights)
    state.ensure_gradients()[0] = 1e25
    worker.optim_step("m", AdamParams(grad_clip_norm=1.0))
    moved = state.weights.clone()
    for _ in range(2):
        state.ensure_gradients().fill_(0.1)
        worker.optim_step("m", AdamParams(learning_rate=1e-2))
    assert bool((state.weights != moved).all() and state.weights.isfinite().all())


def test_a_sequence_ratio_covers_tokens_without_weight(random_base: Path):
    """Against float64, also when tokens that do not count are not scored."""
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1], np.float32)
    weights = np.array([0, 0, 1, 1, 1, 0, 0, 1], np.float32)
    columns = batch(5, (8,), ("logprobs", "advantages"))
    columns.fields["weights"], columns.fields["sequence_ratio_mask"] = weights, mask
    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float64)
    (logprobs,) = reference_logprobs(model, columns)
    given = {name: torch.from_numpy(columns.fields[name]).double() for name in columns.fields}
    drift = ((logprobs.detach() - given["logprobs"]) * mask).sum() / mask.sum()
    wanted = float(-(drift.exp() * given["advantages"] * given["weights"] * mask).sum())
    options = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    for score_uncounted in (True, False):
        worker = worker_for(random_base, score_uncounted=score_uncounted)
        worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
        call = losses.find("gspo").checked(options)
        found = [computed(worker, (0,), "m", columns, call, only) for only in (True, False)]
        assert [one.sums["loss:sum"] for one in found] == pytest.approx([wanted] * 2, rel=1e-4)


def test_packing_and_budget_change_no_number(random_base: Path):
    columns, call = batch(3), losses.find("cross_entropy").checked({})
    results = []
    for budget in (1, 40, 100_000):
        worker = worker_for(random_base, budget=budget)
        worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
        output = computed(worker, tuple(range(len(LENGTHS))), "m", columns, call, False)
        results.append((output.values, worker.models["m"].state.gradients))
    for values, gradients in results[1:]:
        np.testing.assert_allclose(values, results[0][0], atol=5e-6)
        assert gradients is not None and results[0][1] is not None
        assert relative(gradients, results[0][1]) < 1e-5


def test_forward_gives_the_same_logprobs_and_no_gradient(random_base: Path):
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
    columns, call, rows = (
        batch(4),
        losses.find("cross_entropy").checked({}),
        tuple(range(len(LENGTHS))),
    )
    forward = computed(worker, rows, "m", columns, call, True)
    assert worker.models["m"].state.gradients is None
    both = computed(worker, rows, "m", columns, call, False)
    np.testing.assert_array_equal(forward.values, both.values)
    assert forward.sums == both.sums


def test_tenants_do_not_change_each_other_or_the_base(random_base: Path):
    worker = worker_for(random_base)
    columns, call, rows = (
        batch(5),
        losses.find("cross_entropy").checked({}),
        tuple(range(len(LENGTHS))),
    )
    worker.create_model(ModelSpec(model_id="reference", base_model="tiny", lora=LoraSpec(rank=1)))
    start = computed(worker, rows, "reference", columns, call, True).values
    for spec in (
        ModelSpec(model_id="lora", base_model="tiny", lora=LoraSpec(rank=8)),
        ModelSpec(model_id="full", base_model="tiny"),
    ):
        worker.create_model(spec)
        np.testing.assert_allclose(
            computed(worker, rows, spec.model_id, columns, call, True).values, start, atol=1e-5
        )
        computed(worker, rows, spec.model_id, columns, call, False)
        worker.optim_step(spec.model_id, AdamParams(learning_rate=1e-2))
        moved = computed(worker, rows, spec.model_id, columns, call, True).values
        assert np.abs(moved - start).max() > 0.05
    np.testing.assert_array_equal(
        computed(worker, rows, "reference", columns, call, True).values, start
    )


def test_lora_agrees_with_peft(random_base: Path, tmp_path: Path):
    """Gradients equal those of peft, and peft opens our files and gives the same logprobs."""
    worker = worker_for(random_base)
    worker.create_model(
        ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=8, alpha=16.0), seed=3)
    )
    columns, call, rows = (
        batch(6),
        losses.find("cross_entropy").checked({}),
        tuple(range(len(LENGTHS))),
    )
    computed(worker, rows, "m", columns, call, False)
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.save_checkpoint("m", str(tmp_path / "adapter"), form="weights", mark="r1")
    base = AutoModelForCausalLM.from_pretrained(random_base)
    peft_model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    ours = computed(worker, rows, "m", columns, call, False)
    logprobs = torch.cat(reference_logprobs(peft_model, columns))
    reference_loss("cross_entropy", logprobs, columns).backward()
    np.testing.assert_allclose(ours.values, logprobs.detach().numpy(), atol=2e-5)
    state = worker.models["m"].state
    assert state.gradients is not None
    mine = state.split(state.gradients)
    checked = 0
    for key, parameter in peft_model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            name = key.removeprefix("base_model.model.").replace(".default.weight", "")
            assert relative(mine[name], parameter.grad) < 1e-5, key
            checked += 1
    assert checked == len(mine) == 2 * (4 * 7 + 1)


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_has_the_adapter_merged_in(random_base: Path, tmp_path: Path, tied: bool):
    """Plain transformers opens it. A head that is tied to the embedding becomes a separate head."""
    worker = worker_for(random_base)
    worker.create_model(
        ModelSpec(
            model_id="m", base_model="tiny", lora=LoraSpec(rank=4, train_unembed=not tied), seed=3
        )
    )
    columns, rows = batch(5), tuple(range(len(LENGTHS)))
    call = losses.find("cross_entropy").checked({})
    for _ in range(2):
        computed(worker, rows, "m", columns, call, False)
        worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.save_checkpoint("m", str(tmp_path / "c"), form="merged", mark="r1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float64)
    assert model.config.tie_word_embeddings == tied
    with torch.no_grad():
        expected = torch.cat(reference_logprobs(model, columns)).numpy()
    np.testing.assert_allclose(
        computed(worker, rows, "m", columns, call, True).values, expected, atol=5e-5
    )
    assert not (tmp_path / "c" / "adapter_config.json").exists()


def test_an_adapter_of_another_shape_is_refused(random_base: Path, tmp_path: Path):
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(random_base), config)
    model.save_pretrained(tmp_path)
    worker = worker_for(random_base)
    worker.create_model(
        ModelSpec(
            model_id="m",
            base_model="tiny",
            lora=LoraSpec(rank=4, alpha=8.0, train_attn=True, train_mlp=True, train_unembed=False),
        )
    )
    with pytest.raises(InvalidRequest, match="tensors of the checkpoint do not match"):
        worker.load_checkpoint("m", str(tmp_path), with_optimizer=False)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_two_checkpoints_are_mixed_by_their_shares(random_base: Path, tmp_path: Path, lora):
    worker = worker_for(random_base)
    rows = tuple(range(len(LENGTHS)))
    call = losses.find("cross_entropy").checked({})
    for number, model_id in enumerate(("a", "b", "c")):
        worker.create_model(
            ModelSpec(model_id=model_id, base_model="tiny", role="policy", lora=lora, seed=number)
        )
        computed(worker, rows, model_id, batch(number), call, False)
        worker.optim_step(model_id, AdamParams(learning_rate=0.01 * (number + 1)))
        worker.save_checkpoint(model_id, str(tmp_path / model_id), "training", "r1")
    states = (worker.models[name].state for name in ("a", "b"))
    a, b = (state.weights.double() for state in states)  # type: ignore[attr-defined]
    assert (a - b).abs().max() > 1e-3
    worker.load_checkpoint("c", str(tmp_path / "a"), False, (str(tmp_path / "b"), 0.01))
    found = worker.models["c"].state.weights.double()  # type: ignore[attr-defined]
    assert (found - (0.01 * a + 0.99 * b)).abs().max() < 1e-7


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_training_continues_from_a_checkpoint_bit_for_bit(
    random_base: Path, tmp_path: Path, lora, role: Role
):
    """Save after one step, then take another. A model loaded from the file takes the same step."""
    extra = ("values", "returns") if role == "critic" else ()
    call = (
        LossCall("ppo_critic", {"value_clip": 0.2})
        if role == "critic"
        else losses.find("cross_entropy").checked({})
    )
    worker = worker_for(random_base, role)
    rows = tuple(range(len(LENGTHS)))
    for model_id in ("a", "b"):
        worker.create_model(
            ModelSpec(
                model_id=model_id, base_model="tiny", role=role, lora=lora, seed=ord(model_id)
            )
        )

    def train(model_id: str, seed: int) -> None:
        computed(worker, rows, model_id, batch(seed, extra=extra), call, False)
        worker.optim_step(model_id, AdamParams(learning_rate=1e-3))

    train("a", 1)
    worker.save_checkpoint("a", str(tmp_path / "c"), form="training", mark="r1")
    train("a", 2)
    worker.load_checkpoint("b", str(tmp_path / "c"), with_optimizer=True)
    train("b", 2)
    assert torch.equal(worker.models["a"].state.weights, worker.models["b"].state.weights)
    worker.load_checkpoint("b", str(tmp_path / "c"), with_optimizer=False)
    train("b", 2)
    assert not torch.equal(worker.models["a"].state.weights, worker.models["b"].state.weights)
    assert not [f for f in tmp_path.iterdir() if "partial" in f.name or f.name.endswith(".old")]


def test_full_checkpoint_opens_in_plain_transformers(random_base: Path, tmp_path: Path):
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    columns, call, rows = (
        batch(7),
        losses.find("cross_entropy").checked({}),
        tuple(range(len(LENGTHS))),
    )
    computed(worker, rows, "m", columns, call, False)
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.save_checkpoint("m", str(tmp_path / "c"), form="training", mark="r1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    with torch.no_grad():
        expected = torch.cat(reference_logprobs(model, columns)).numpy()
    np.testing.assert_allclose(
        computed(worker, rows, "m", columns, call, True).values, expected, atol=2e-5
    )


def test_gradients_can_leave_before_the_weights_and_return_after_them():
    """Phases free gradients before weights, and load weights before gradients."""
    state = FlatState({"w": torch.randn(4, 3), "b": torch.randn(3)}, torch.device("cpu"))
    state.ensure_gradients()
    (2 * state.views["w"].sum()).backward()
    kept = state.gradients
    state.move("gradients", torch.device("meta"))
    assert all(view.grad is None for view in state.views.values())
    state.gradients = kept
    state.move("weights", torch.device("cpu"))
    state.move("gradients", torch.device("cpu"))
    (3 * state.views["w"].sum()).backward()
    assert state.gradients is not None and state.gradients.tolist() == [5.0] * 12 + [0.0] * 3
