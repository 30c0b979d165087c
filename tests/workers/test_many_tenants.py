"""Rows of many models share passes, and each model computes as if it were alone.

Invalid input of one model leaves the other models and its own state unchanged.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec, Role
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, Refused, RowOutput, WorkerSpec
from skyrl_actors.workers.passes import PassRunner
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import batch, inputs_of, relative
from tests.workers.tiny_models import make

TENANTS = (
    (ModelSpec(model_id="a", base_model="tiny", lora=LoraSpec(rank=4), seed=1), "ppo", {}),
    (
        ModelSpec(
            model_id="b",
            base_model="tiny",
            lora=LoraSpec(rank=8, alpha=16.0, train_unembed=False),
            seed=2,
        ),
        "cross_entropy",
        {},
    ),
    (
        ModelSpec(model_id="c", base_model="tiny", lora=LoraSpec(rank=16, train_mlp=False), seed=3),
        "importance_sampling",
        {"entropy_coef": 0.01},
    ),
    (
        ModelSpec(
            model_id="d",
            base_model="tiny",
            lora=LoraSpec(rank=2, train_attn=False, train_unembed=False),
            seed=4,
        ),
        "cross_entropy",
        {},
    ),
)
LENGTHS = ((9, 4, 17), (5,), (12, 12, 3, 30), (8, 2))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


def worker_for(base: Path, role: Role = "policy", **options: Any) -> TorchWorker:
    budget = options.pop("budget", 64)
    spec = WorkerSpec(
        role=role,
        rank=0,
        world_size=1,
        base_folder=str(base),
        dtype="float32",
        device="cpu",
        num_threads=1,
        microbatch_tokens=budget,
        collective_timeout_s=60.0,
        **options,
    )
    worker = TorchWorker(spec)
    worker.setup("127.0.0.1", 0)
    return worker


def part(model_id: str, columns: Columns, name: str, options: dict[str, float]) -> PartCall:
    return PartCall(
        model_id=model_id,
        rows=tuple(range(columns.num_rows)),
        columns=columns,
        loss=losses.find(name).checked(options),
    )


def parts_of(step: int) -> list[PartCall]:
    return [
        part(spec.model_id, batch(10 * step + i, lengths, inputs_of(name)), name, options)
        for i, ((spec, name, options), lengths) in enumerate(zip(TENANTS, LENGTHS, strict=True))
    ]


def state(worker: TorchWorker, model_id: str) -> FlatState:
    found = worker.models[model_id].state
    assert isinstance(found, FlatState)
    return found


def train(worker: TorchWorker, together: bool) -> list[Any]:
    outputs = []
    for step in range(3):
        for accumulated in range(2):
            parts = parts_of(7 * step + accumulated)
            batches = [tuple(parts)] if together else [(one,) for one in parts]
            for some in batches:
                outputs += worker.forward_backward(some, False)
        for i, (spec, _, _) in enumerate(TENANTS):
            outputs.append(
                worker.optim_step(
                    spec.model_id,
                    AdamParams(learning_rate=1e-3 * (i + 1), grad_clip_norm=float(i), eps=1e-5),
                )
            )
    return outputs


@pytest.mark.parametrize("budget", [64, 4096])
def test_tenants_in_shared_passes_equal_each_alone(base: Path, budget: int):
    """Tenants differ in ranks, targets, losses, steps and clips.

    With 64 tokens a pass has two tenants, with 4096 all tenants.
    """
    together, alone = worker_for(base, budget=budget), worker_for(base)
    for worker in (together, alone):
        for spec, _, _ in TENANTS:
            worker.create_model(spec)
    for a, b in zip(train(together, True), train(alone, False), strict=True):
        if isinstance(a, dict):
            assert a == pytest.approx(b, rel=1e-5)
            continue
        np.testing.assert_allclose(a.values, b.values, atol=1e-5)
        assert a.sums == pytest.approx(b.sums, rel=1e-5, abs=1e-5)
    for spec, _, _ in TENANTS:
        assert (
            relative(state(together, spec.model_id).weights, state(alone, spec.model_id).weights)
            < 1e-6
        )


def test_gradients_in_shared_passes_equal_each_alone(base: Path):
    worker = worker_for(base, budget=4096)
    for spec, _, _ in TENANTS:
        worker.create_model(spec)
    with torch.no_grad():
        for spec, _, _ in TENANTS:  # B starts at zero, so A's gradient would be zero
            weights = state(worker, spec.model_id).weights
            weights.add_(
                torch.randn(len(weights), generator=torch.Generator().manual_seed(5)) * 0.05
            )
    found = []
    for together in (True, False):
        parts = parts_of(3)
        for some in [tuple(parts)] if together else [(one,) for one in parts]:
            worker.forward_backward(some, False)
        for spec, _, _ in TENANTS:
            gradients = state(worker, spec.model_id).gradients
            assert gradients is not None
            found.append(gradients.clone())
            worker.drop_gradients(spec.model_id)
    for a, b in zip(found[: len(TENANTS)], found[len(TENANTS) :], strict=True):
        assert relative(a, b) < 1e-6


def test_critics_share_a_pass(base: Path):
    specs = [
        ModelSpec(
            model_id=name, base_model="tiny", role="critic", lora=LoraSpec(rank=rank), seed=seed
        )
        for name, rank, seed in (("x", 4, 1), ("y", 8, 2))
    ]
    results = []
    for together in (True, False):
        worker = worker_for(base, "critic")
        for i, spec in enumerate(specs):
            worker.create_model(spec)
            state(worker, spec.model_id).views["value_head.weight"].data.fill_(0.1 * (i + 1))
        parts = [
            part(s.model_id, batch(i, LENGTHS[i], inputs_of("ppo_critic"), False), "ppo_critic", {})
            for i, s in enumerate(specs)
        ]
        outputs: list[Any] = []
        for some in [tuple(parts)] if together else [(one,) for one in parts]:
            outputs += worker.forward_backward(some, False)
        results.append((outputs, [state(worker, s.model_id).gradients for s in specs]))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(a.values, b.values, atol=1e-6)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert a is not None and b is not None and relative(a, b) < 1e-6


def spoiled(columns: Columns, field: str, value: float) -> Columns:
    """Set the last token of the second row to this value."""
    array = columns.fields[field].copy()
    array[columns.offsets[2] - 1] = value
    return Columns(
        tokens=columns.tokens, offsets=columns.offsets, fields={**columns.fields, field: array}
    )


@pytest.mark.parametrize(
    ("field", "value"), [("advantages", np.inf), ("logprobs", -1e9), ("advantages", np.nan)]
)
def test_an_input_that_is_not_finite_is_refused_by_datum_and_changes_nothing(
    base: Path, field: str, value: float
):
    """This holds in the second pass of a call too, and beside a tenant with valid input."""
    worker, alone = worker_for(base, budget=20), worker_for(base, budget=20)
    for at in (worker, alone):
        for spec, _, _ in TENANTS[:2]:
            at.create_model(spec)
    good, other = parts_of(1)[:2]
    worker.forward_backward((good,), False)
    before = state(worker, "a").gradients
    assert before is not None
    before = before.clone()
    bad = part("a", spoiled(batch(4, (9, 17, 4), inputs_of("ppo")), field, value), "ppo", {})
    refused, fine = worker.forward_backward((bad, other), False)
    assert isinstance(refused, Refused) and refused.clean
    assert "datum 1" in str(refused.error) and "token 16" in str(refused.error)
    assert isinstance(fine, RowOutput)
    assert torch.equal(state(worker, "a").gradients, before)  # type: ignore[arg-type]
    alone.forward_backward((other,), False)
    found, wanted = state(worker, "b").gradients, state(alone, "b").gradients
    assert relative(found, wanted) < 1e-6  # type: ignore[arg-type]


def test_a_weight_that_is_not_finite_affects_only_rows_of_its_adapter(base: Path):
    worker = worker_for(base, budget=4096)
    for spec, _, _ in TENANTS[:2]:
        worker.create_model(spec)
    with torch.no_grad():
        state(worker, "a").weights[-1] = torch.nan
    refused, fine = worker.forward_backward(tuple(parts_of(1)[:2]), False)
    assert isinstance(refused, Refused) and isinstance(fine, RowOutput)
    assert np.isfinite(fine.values).all() and bool(
        torch.isfinite(state(worker, "b").gradients).all()
    )  # type: ignore[arg-type]
    assert not state(worker, "a").gradients.any()  # type: ignore[union-attr]


class ShortOfMemory:
    """Fail passes of more than `limit` tokens in the backward, with half of the gradients added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int):
        whole = PassRunner._backward

        def backward(runner: PassRunner, parts: Any, surrogate: torch.Tensor) -> None:
            whole(runner, parts, surrogate)
            if self.tokens > limit:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

        run = PassRunner.run

        def counted(runner: PassRunner, parts: Any, plan: Any) -> None:
            self.tokens = plan.num_tokens
            run(runner, parts, plan)

        self.tokens = 0
        monkeypatch.setattr(PassRunner, "_backward", backward)
        monkeypatch.setattr(PassRunner, "run", counted)


def test_after_out_of_memory_a_pass_runs_in_halves(base: Path, monkeypatch: pytest.MonkeyPatch):
    worker, roomy = worker_for(base, budget=4096), worker_for(base, budget=4096)
    for at in (worker, roomy):
        for spec, _, _ in TENANTS:
            at.create_model(spec)
    parts = tuple(parts_of(1))
    wanted = roomy.forward_backward(parts, False)
    ShortOfMemory(monkeypatch, 60)  # all rows together have 102 tokens
    found = worker.forward_backward(parts, False)
    for a, b in zip(found, wanted, strict=True):
        assert isinstance(a, RowOutput) and isinstance(b, RowOutput)
        assert a.sums == pytest.approx(b.sums, rel=1e-5, abs=1e-5)
    for spec, _, _ in TENANTS:
        assert (
            relative(state(worker, spec.model_id).gradients, state(roomy, spec.model_id).gradients)
            < 1e-6
        )  # type: ignore[arg-type]


def test_out_of_memory_in_halves_is_a_clear_error(base: Path, monkeypatch: pytest.MonkeyPatch):
    worker = worker_for(base, budget=4096)
    worker.create_model(TENANTS[0][0])
    worker.forward_backward((parts_of(1)[0],), False)
    before = state(worker, "a").gradients.clone()  # type: ignore[union-attr]
    ShortOfMemory(monkeypatch, 1)
    (refused,) = worker.forward_backward((parts_of(2)[0],), False)
    assert (
        isinstance(refused, Refused) and refused.clean and "microbatch_tokens" in str(refused.error)
    )
    assert torch.equal(state(worker, "a").gradients, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_saving_memory_changes_no_number(base: Path, activations: str, lora: LoraSpec | None):
    found = []
    for way in ("keep", activations):
        worker = worker_for(base, activations=way)
        worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
        worker.forward_backward((part("m", batch(3, (9, 30, 4)), "cross_entropy", {}),), False)
        found.append(state(worker, "m").gradients)
    assert relative(found[1], found[0]) < 1e-6


def test_creating_switching_and_deleting_a_tenant_leaves_the_base_unchanged(base: Path):
    """A tenant adds only its own tensors: weights, and gradients after the first call."""
    worker = worker_for(base)
    for i in range(20):
        worker.create_model(
            ModelSpec(model_id=f"t{i}", base_model="tiny", lora=LoraSpec(rank=4), seed=i)
        )
    sizes = {state(worker, f"t{i}").weights.untyped_storage().nbytes() for i in range(20)}
    assert sizes == {state(worker, "t0").num_parameters * 4}
    views = state(worker, "t3").views.values()
    assert {view.untyped_storage().data_ptr() for view in views} == {
        state(worker, "t3").weights.untyped_storage().data_ptr()
    }
    worker.delete_model("t3")
    assert "t3" not in worker.models


def test_the_entropy_bonus_is_subtracted_from_the_loss(base: Path):
    """The reference is float64: the gradient of −Σ w·log p − c·Σ H over the counted tokens."""
    from tests.workers.references import Reference

    columns = batch(5, (9, 14), inputs_of("ppo"))
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    (output,) = worker.forward_backward((part("m", columns, "ppo", {"entropy_coef": 0.3}),), False)
    assert isinstance(output, RowOutput)
    reference = Reference(base)
    plain = reference.backward("ppo", columns)
    bonus = torch.zeros((), dtype=torch.float64)
    for i in range(2):
        where = columns.positions([i])
        log_p = torch.log_softmax(
            reference.model(
                input_ids=torch.tensor(columns.tokens[where][None].astype(np.int64))
            ).logits[0],
            -1,
        )
        entropy = -(log_p.exp() * log_p).sum(-1)
        bonus = bonus + (entropy * torch.tensor(columns.fields["weights"][where] != 0)).sum()
    (-0.3 * bonus).backward()
    assert output.sums["entropy:sum"] == pytest.approx(float(bonus), rel=1e-5)
    assert output.sums["loss:sum"] == pytest.approx(plain - 0.3 * float(bonus), rel=1e-4)
    gradients = state(worker, "m").gradients
    assert gradients is not None
    for name, gradient in state(worker, "m").split(gradients).items():
        assert relative(gradient, reference.gradients()[name]) < 1e-5, name


def test_metrics_of_entropy_and_kl_are_always_present(base: Path):
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
    columns = batch(5, (9, 14), inputs_of("ppo"))
    (output,) = worker.forward_backward((part("m", columns, "ppo", {}),), False)
    assert isinstance(output, RowOutput)
    counted = columns.fields["weights"] != 0
    difference = output.values.astype(np.float64) - np.asarray(
        columns.fields["logprobs"], np.float64
    )
    assert output.sums["kl:sum"] == pytest.approx(
        float(((np.exp(difference) - 1 - difference) * counted).sum()), rel=1e-4
    )
    assert output.sums["counted_tokens:sum"] == counted.sum()
    assert 0 < output.sums["entropy:sum"] <= counted.sum() * np.log(128) + 1e-3


@pytest.mark.parametrize(
    "bad", [LoraSpec(rank=4, train_attn=False, train_mlp=False, train_unembed=False)]
)
def test_a_lora_that_trains_nothing_is_refused(base: Path, bad: LoraSpec):
    with pytest.raises(InvalidRequest, match="trains nothing"):
        worker_for(base).create_model(ModelSpec(model_id="m", base_model="tiny", lora=bad))


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)])
def test_a_forward_that_runs_out_of_memory_leaves_pending_gradients(
    base: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraSpec | None
):
    worker = worker_for(base, budget=4096)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
    call = part("m", batch(3, (9, 30, 4)), "cross_entropy", {})
    worker.forward_backward((call,), False)
    before = state(worker, "m").gradients.clone()  # type: ignore[union-attr]
    monkeypatch.setattr(PassRunner, "run", _no_memory)
    (refused,) = worker.forward_backward((call,), True)
    assert isinstance(refused, Refused) and refused.clean
    # Added and pending gradients cannot be separated, so the model is rebuilt from the journal.
    if lora is None:
        with pytest.raises(torch.OutOfMemoryError):
            worker.forward_backward((call,), False)
    assert torch.equal(state(worker, "m").gradients, before)  # type: ignore[arg-type]


def _no_memory(runner: PassRunner, parts: Any, plan: Any) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
