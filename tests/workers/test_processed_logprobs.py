"""Logprobs of the sampling distribution: temperature, top_k and top_p, against plain float64."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_actors.losses import check_inputs, find
from skyrl_actors.losses.processing import Processing
from skyrl_actors.losses.truncation import floors
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.model import LoraSpec, LossCall, ModelSpec
from skyrl_actors.workers import chunk_math, head
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.head import HeadSegment, score
from skyrl_actors.workers.interface import PartCall, RowOutput
from tests.workers.test_head import T, V, plain, tensors
from tests.workers.test_numbers import batch, computed, reference_logprobs, relative, worker_for

PROCESSINGS = [
    Processing(temperature=0.6),
    Processing(temperature=1.7, top_k=4),
    Processing(temperature=0.8, top_p=0.7),
    Processing(top_k=9, top_p=0.5),
]


def allowed(row: np.ndarray, processing: Processing) -> np.ndarray:
    """Return [V] bool, by sorting the tokens of one row and adding probabilities one by one."""
    order = sorted(range(len(row)), key=lambda token: -row[token])
    order = order[: processing.top_k or None]
    p = np.exp(row[order] - row.max())
    p /= p.sum()
    found, mass = np.zeros(len(row), bool), 0.0
    for token, share in zip(order, p, strict=True):
        if mass >= processing.top_p and found.any():
            break
        found[token] = True
        mass += share
    return found


def processed(logits: torch.Tensor, targets: torch.Tensor, processing: Processing):
    """Return log p of targets [T, K] and entropies [T], from logits [T, V]."""
    z = logits / processing.temperature
    left = np.stack([allowed(row, processing) for row in z.detach().double().numpy()])
    keep = torch.from_numpy(left).scatter(1, targets, True)
    log_p = z.masked_fill(~keep, -torch.inf).log_softmax(1)
    terms = log_p.exp() * log_p.masked_fill(~keep, 0.0)
    return log_p.gather(1, targets), -terms.sum(1)


def logits_of(x: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = x["hidden"] @ x["weight"].t()
    if "a" in x:
        low_rank = (x["hidden"][:9] @ x["a"].t()) @ x["b"].t() * 0.7
        logits = torch.cat([logits[:9] + low_rank, logits[9:]])
    return logits


CASES = list(
    itertools.product(PROCESSINGS, [False, True], [False, True], [False, True], [False, True])
)


@pytest.mark.parametrize(("processing", "trained", "low_rank", "keep", "with_entropy"), CASES)
def test_values_and_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch,
    processing: Processing,
    trained: bool,
    low_rank: bool,
    keep: bool,
    with_entropy: bool,
):
    """The first segment is processed, and the second one has the model's own distribution."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 5 * V)
    monkeypatch.setattr(head, "KEPT_LOGITS", T * V if keep else 0)
    x = tensors(trained, low_rank, 0)
    segments = [
        HeadSegment(num_tokens=9, a=x.get("a"), b=x.get("b"), scale=0.7, processing=processing),
        HeadSegment(num_tokens=T - 9),
    ]
    leaves = [
        x[name] for name in ("hidden", "weight", "a", "b") if name in x and x[name].requires_grad
    ]
    first = processed(logits_of(x)[:9], x["targets"][:9, None], processing)
    rest = plain(x)
    wanted = torch.cat([first[0][:, 0], rest[0][9:]]), torch.cat([first[1], rest[1][9:]])

    def total(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = (found[0] * x["of_logprobs"]).sum()
        return loss + (found[1] * x["of_entropy"]).sum() if with_entropy else loss

    ours = score(x["hidden"], x["weight"], x["targets"], segments, entropy_gradient=with_entropy)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(total(ours), leaves),
        torch.autograd.grad(total(wanted), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("with_entropy", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_compiled_math_equals_float64(monkeypatch: pytest.MonkeyPatch, with_entropy: bool):
    monkeypatch.setattr(head, "COMPILED_ON", ("cpu",))
    chunk_math._compiled.cache_clear()
    test_values_and_gradients_equal_float64(
        monkeypatch, PROCESSINGS[3], with_entropy, with_entropy, False, with_entropy
    )


def test_bfloat16_is_processed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, 32).bfloat16(), torch.randn(V, 32).bfloat16()
    targets, processing = torch.randint(0, V, (T,)), Processing(temperature=0.3, top_k=20)
    leaf = hidden.clone().requires_grad_()
    found, _ = score(leaf, weight, targets, [HeadSegment(num_tokens=T, processing=processing)])
    # The product is rounded to bfloat16, as in an engine; all else is not.
    rounded = (hidden @ weight.t()).double()
    wanted, _ = processed(rounded, targets[:, None], processing)
    torch.testing.assert_close(found.double(), wanted[:, 0], rtol=0, atol=1e-4)
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    wide = hidden.double().requires_grad_()
    exact, _ = processed(wide @ weight.double().t(), targets[:, None], processing)
    (reference,) = torch.autograd.grad(exact.sum(), wide)
    assert relative(slope, reference) < 0.05


def test_floors_of_rows_with_their_own_limits_and_of_ties():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 30, generator=generator, dtype=torch.float64) * 2
    top_k = torch.randint(0, 12, (40,), generator=generator)
    top_p = torch.rand(40, generator=generator, dtype=torch.float64)
    least = floors(logits, top_k, top_p)
    for row in range(40):
        limits = Processing(top_k=int(top_k[row]), top_p=float(top_p[row]))
        left = (logits[row] >= least[row]).numpy()
        np.testing.assert_array_equal(left, allowed(logits[row].numpy(), limits))
    tied = floors(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), torch.tensor([1]), torch.tensor([1.0]))
    assert tied.tolist() == [3.0]  # tokens of equal logits are left together


def test_two_tenants_of_a_pass_have_their_own_distribution(random_base: Path):
    """Two adapters in one pass equal transformers in float64, a row at a time."""
    worker = worker_for(random_base, budget=400)
    for name in ("a", "b"):
        lora = LoraSpec(rank=2, train_unembed=name == "a")
        worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=lora, seed=1))
    columns = batch(3, extra=("logprobs", "advantages"))
    options = {"a": {"temperature": 0.5, "top_k": 8.0, "top_p": 0.9}, "b": {"temperature": 1.5}}
    calls = tuple(
        PartCall(
            model_id=name,
            rows=tuple(range(columns.num_rows)),
            columns=columns,
            loss=find("importance_sampling").checked(given),
        )
        for name, given in options.items()
    )
    outputs = worker.forward_backward(calls, False)
    model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float64)
    for given, output in zip(options.values(), outputs, strict=True):
        assert isinstance(output, RowOutput)
        processing = Processing(
            temperature=given["temperature"],
            top_k=int(given.get("top_k", 0)),
            top_p=given.get("top_p", 1.0),
        )
        wanted = []
        for row in range(columns.num_rows):
            where = columns.positions([row])
            tokens = torch.tensor(columns.tokens[where][None].astype(np.int64))
            targets = torch.tensor(columns.fields[TARGETS][where].astype(np.int64))[:, None]
            with torch.no_grad():
                logits = model(input_ids=tokens, use_cache=False).logits[0]
            wanted.append(processed(logits, targets, processing)[0][:, 0].numpy())
        np.testing.assert_allclose(output.values, np.concatenate(wanted), atol=1e-5)


def test_options_of_no_effect_change_no_bit(random_base: Path):
    worker = worker_for(random_base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=2)))
    columns = batch(4)
    rows = tuple(range(columns.num_rows))
    calls = [
        LossCall("cross_entropy", {}),
        find("cross_entropy").checked({}),
        find("cross_entropy").checked({"top_k": -1, "temperature": 1, "top_p": 1}),
    ]
    found = [computed(worker, rows, "m", columns, call, False).values for call in calls]
    state = worker.models["m"].state
    assert isinstance(state, FlatState)
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(random_base, dtype=torch.float64)
        wanted = torch.cat(reference_logprobs(model, columns)).numpy()
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature is 0; it must be above 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a number of tokens"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0}, "top_p is 0; it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 0.1}, "no option 'min_p'"),
        ({"temperature": float("nan")}, "must be a finite number"),
    ],
)
def test_values_without_a_meaning_are_refused(options: dict[str, float], message: str):
    entry, columns = find("ppo"), batch(1, extra=("logprobs", "advantages"))
    with pytest.raises(InvalidRequest, match=message):
        check_inputs(entry, entry.checked(options), "policy", columns, False)


def test_several_targets_a_token_take_a_temperature_and_no_truncation():
    entry, tokens = find("cross_entropy"), np.arange(4, dtype=np.int32)
    fields = {TARGETS: np.zeros((4, 2), np.int32), "weights": np.ones((4, 2), np.float32)}
    columns = columns_from([Example(tokens, fields)])
    check_inputs(entry, entry.checked({"temperature": 0.5}), "policy", columns, False)
    with pytest.raises(InvalidRequest, match="not the shape"):
        check_inputs(entry, entry.checked({"top_k": 5}), "policy", columns, False)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_k": 1}, {"top_p": 0.5}])
def test_more_targets_of_another_tenant_leave_a_distribution_alone(
    random_base: Path, options: dict[str, float]
):
    worker = worker_for(random_base, budget=400)
    for name in ("a", "b"):
        worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=2)))
    own = batch(3, extra=("logprobs", "advantages"))
    wide = {TARGETS: np.arange(15, dtype=np.int32).reshape(5, 3)}
    wide["weights"] = np.ones((5, 3), np.float32)
    other = columns_from([Example(np.arange(5, dtype=np.int32), wide)])
    calls = (
        PartCall(
            model_id="a",
            rows=tuple(range(own.num_rows)),
            columns=own,
            loss=find("importance_sampling").checked(options),
        ),
        PartCall(model_id="b", rows=(0,), columns=other, loss=find("cross_entropy").checked({})),
    )

    def found(calls: tuple[PartCall, ...]) -> tuple[np.ndarray, torch.Tensor]:
        for name in ("a", "b"):
            worker.drop_gradients(name)
        output = worker.forward_backward(calls, False)[0]
        assert isinstance(output, RowOutput)
        state = worker.models["a"].state
        assert isinstance(state, FlatState)
        return output.values, state.ensure_gradients().clone()

    (alone, slopes), (shared, shared_slopes) = found(calls[:1]), found(calls)
    np.testing.assert_allclose(shared, alone, atol=1e-5)
    assert relative(shared_slopes, slopes) < 1e-5
