"""Compare losses with float64 formulas in plain loops, and gradients with finite differences."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_actors import losses
from skyrl_actors.losses.loss_reference import markdown
from skyrl_actors.losses.torch_ops import TorchOps
from skyrl_actors.messages.columns import columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import Example

RNG = np.random.default_rng(0)
T = 40
P = RNG.normal(-1.5, 0.7, T)
INPUTS = {
    "logprobs": P + RNG.normal(0, 0.4, T),
    "advantages": RNG.normal(0, 1, T),
    "weights": RNG.normal(0.5, 1, T),
    "values": RNG.normal(0, 1, T),
    "returns": RNG.normal(0, 1, T),
    "sequence_ratio_mask": (RNG.random(T) < 0.8).astype(np.float64),
}
LENGTHS = (7, 13, 20)
OPS = TorchOps(LENGTHS)


def sequence_ratios(predicted: np.ndarray) -> list[float]:
    """Return, for each token, exp of the mean drift over the masked tokens of its row."""
    ratios, start = [], 0
    for length in LENGTHS:
        kept = [t for t in range(start, start + length) if INPUTS["sequence_ratio_mask"][t]]
        drift = sum(predicted[t] - INPUTS["logprobs"][t] for t in kept) / len(kept)
        ratios += [math.exp(drift)] * length
        start += length
    return ratios


def reference(name: str, predicted: np.ndarray) -> float:
    total, whole = 0.0, sequence_ratios(predicted)
    for t in range(T):
        p, w = predicted[t], INPUTS["weights"][t]
        q, a = INPUTS["logprobs"][t], INPUTS["advantages"][t]
        ratio = math.exp(p - q)
        if name == "cross_entropy":
            total += -w * p
        elif name == "importance_sampling":
            total += -w * ratio * a
        elif name == "ppo":
            total += -w * min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
        elif name == "cispo":
            total += -w * min(max(ratio, 0.7), 1.1) * p * a
        elif name == "dro":
            total += -w * (p * a - 0.5 * 0.3 * (p - q) ** 2)
        elif name == "gspo":
            s = whole[t]
            total += -w * min(s * a, min(max(s, 0.95), 1.02) * a) * INPUTS["sequence_ratio_mask"][t]
        elif name == "dppo":
            moved = math.exp(p) - math.exp(q)
            masked = (a > 0 and moved > 0.02) or (a < 0 and moved < -0.03)
            total += 0.0 if masked else -w * ratio * a
        else:
            old, goal = INPUTS["values"][t], INPUTS["returns"][t]
            bounded = min(max(p, old - 0.3), old + 0.3)
            total += 0.5 * w * max((p - goal) ** 2, (bounded - goal) ** 2)
    return total


def stopped_gradient(name: str) -> list[float]:
    """Return the gradient of losses that detach terms, where finite differences do not apply."""
    whole, gradient = sequence_ratios(P), []
    for t in range(T):
        a, w, ratio = (
            INPUTS["advantages"][t],
            INPUTS["weights"][t],
            math.exp(P[t] - INPUTS["logprobs"][t]),
        )
        if name == "cispo":
            gradient.append(-w * min(max(ratio, 0.7), 1.1) * a)
        else:
            s = whole[t]
            is_clipped = min(max(s, 0.95), 1.02) * a < s * a
            gradient.append(0.0 if is_clipped else -w * s * a * INPUTS["sequence_ratio_mask"][t])
    return gradient


OPTIONS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    "ppo_critic": {"value_clip": 0.3},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02},
    "dppo": {"delta_high": 0.02, "delta_low": 0.03},
}


def test_every_registered_loss_is_tested():
    assert set(losses.REGISTRY) == {*OPTIONS, "cross_entropy", "importance_sampling", "custom"}


@pytest.mark.parametrize("name", sorted(losses.REGISTRY.keys() - {"custom"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradient_match_the_formula(name: str, dtype: torch.dtype):
    entry = losses.find(name)
    needed = (*entry.required, *entry.optional)
    predicted = torch.tensor(P, dtype=dtype, requires_grad=True)
    inputs = {key: torch.tensor(INPUTS[key], dtype=dtype) for key in needed}
    call = entry.checked(OPTIONS.get(name, {}))
    total = entry.terms(OPS, predicted, inputs, call.config).elementwise.sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(reference(name, P), rel=1e-5)
    step = 1e-6
    if name in ("cispo", "gspo"):
        numeric = stopped_gradient(name)
    else:
        numeric = [
            (reference(name, P + step * e) - reference(name, P - step * e)) / (2 * step)
            for e in np.eye(T)
        ]
    assert predicted.grad is not None
    np.testing.assert_allclose(
        predicted.grad.numpy(), numeric, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-7
    )


@pytest.mark.parametrize("name", ["ppo", "dppo", "importance_sampling"])
@pytest.mark.parametrize("options", [{"log_ratio_limit": 0.5}, {"dual_clip": 1.4}])
def test_bounds_of_the_ratio_match_the_formula(name: str, options: dict[str, float]):
    if "dual_clip" in options and name != "ppo":
        with pytest.raises(InvalidRequest, match="has no option 'dual_clip'"):
            losses.find(name).checked(options)
        return
    entry = losses.find(name)
    far = P + RNG.choice([-1.0, 1.0], T) * np.linspace(0.0, 3.0, T)
    needed = {key: INPUTS[key] for key in (*entry.required, *entry.optional)}
    inputs = {key: torch.tensor(value) for key, value in (needed | {"logprobs": far}).items()}
    config = entry.checked({**OPTIONS.get(name, {}), **options}).config

    def value(p: np.ndarray) -> float:
        total = 0.0
        for t in range(T):
            a, w, difference = INPUTS["advantages"][t], INPUTS["weights"][t], p[t] - far[t]
            limit = options.get("log_ratio_limit", math.inf)
            ratio = math.exp(min(max(difference, -limit), limit))
            if name == "ppo":
                kept = min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
                if a < 0 and "dual_clip" in options:
                    kept = max(kept, 1.4 * a)
            else:
                kept = ratio * a
            moved = math.exp(p[t]) - math.exp(far[t])
            if name == "dppo" and ((a > 0 and moved > 0.02) or (a < 0 and moved < -0.03)):
                kept = 0.0
            total -= w * kept
        return total

    predicted = torch.tensor(P, requires_grad=True)
    total = entry.terms(OPS, predicted, inputs, config).elementwise.sum()
    total.backward()
    assert predicted.grad is not None
    assert float(total.detach()) == pytest.approx(value(P), rel=1e-9)
    numeric = [(value(P + 1e-6 * e) - value(P - 1e-6 * e)) / 2e-6 for e in np.eye(T)]
    np.testing.assert_allclose(predicted.grad.numpy(), numeric, rtol=1e-5, atol=1e-7)
    plain = entry.terms(OPS, torch.tensor(P), inputs, entry.checked(OPTIONS.get(name, {})).config)
    assert float(plain.elementwise.sum()) != pytest.approx(float(total.detach()), rel=1e-3)


def test_a_log_ratio_limit_keeps_a_far_token_finite():
    entry = losses.find("ppo")
    fields = {"logprobs": torch.tensor([-500.0]), "advantages": torch.tensor([-1.0])}
    inputs = fields | {"weights": torch.ones(1)}
    for options, finite in (({}, False), ({"log_ratio_limit": 20.0}, True)):
        config = entry.checked(options).config
        terms = entry.terms(TorchOps([1]), torch.tensor([-0.1]), inputs, config)
        assert bool(torch.isfinite(terms.elementwise).all()) == finite


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log_ratio_limit": -1.0}, "log_ratio_limit is -1; it must be above 0"),
        ({"dual_clip": 0.5}, "dual_clip is 0.5; it must be above 1"),
        ({"clip_low_threshold": 1.3}, "clip_low_threshold 1.3 is above clip_high_threshold 1.2"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, float], message: str):
    with pytest.raises(InvalidRequest, match=message):
        losses.find("ppo").checked(options)


def test_clipped_tokens_are_counted():
    entry = losses.find("ppo")
    ratio, advantages = [0.5, 0.5, 1.0, 2.0, 2.0], [1.0, -1.0, 1.0, 1.0, -1.0]
    inputs = {
        "logprobs": torch.zeros(5),
        "advantages": torch.tensor(advantages),
        "weights": torch.ones(5),
    }
    terms = entry.terms(TorchOps([5]), torch.tensor(ratio).log(), inputs, entry.checked({}).config)
    assert terms.sums["clipped_tokens:sum"] == 2  # 0.5 with A < 0, 2.0 with A > 0


def columns(**fields: list[float]):
    arrays = {
        k: np.asarray(v, np.int32 if k == "target_tokens" else np.float32)
        for k, v in fields.items()
    }
    return columns_from([Example(np.zeros(2, np.int32), arrays)])


@pytest.mark.parametrize(
    ("name", "role", "fields", "forward_only", "message"),
    [
        (
            "ppo",
            "policy",
            {"target_tokens": [1, 2], "logprobs": [0, 0]},
            False,
            "missing: advantages",
        ),
        ("cross_entropy", "policy", {"weights": [1, 1]}, False, "missing: target_tokens"),
        (
            "ppo_critic",
            "policy",
            {"values": [0, 0], "returns": [0, 0]},
            False,
            "is for a critic, this model is a policy",
        ),
        (
            "ppo",
            "critic",
            {"values": [0, 0], "returns": [0, 0]},
            False,
            "is for a policy, this model is a critic; use ppo_critic",
        ),
        ("ppo_critic", "critic", {"values": [0, 0]}, True, "missing: returns"),
        (
            "cross_entropy",
            "policy",
            {"target_tokens": [1, 2], "advantages": [0, 0]},
            False,
            "does not use advantages",
        ),
    ],
)
def test_inputs_are_checked(name, role, fields, forward_only, message):
    with pytest.raises(InvalidRequest, match=message):
        losses.check_inputs(
            losses.find(name), losses.find(name).checked({}), role, columns(**fields), forward_only
        )


def test_a_critic_forward_needs_no_inputs():
    entry = losses.find("ppo_critic")
    losses.check_inputs(
        entry, entry.checked({}), "critic", columns(target_tokens=[1, 2]), forward_only=True
    )


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_divergence_from_a_reference_is_a_term_of_the_loss(estimator: str):
    entry = losses.find("ppo")
    reference = P + RNG.normal(0, 0.5, T)
    inputs = {key: torch.tensor(INPUTS[key]) for key in (*entry.required, *entry.optional)}
    inputs["reference_logprobs"] = torch.tensor(reference)

    def run(coef: float) -> tuple[float, np.ndarray]:
        predicted = torch.tensor(P, requires_grad=True)
        call = entry.checked({"kl_coef": coef, "kl_estimator": estimator})
        total = entry.terms(OPS, predicted, inputs, call.config).elementwise.sum()
        total.backward()
        assert predicted.grad is not None
        return float(total.detach()), predicted.grad.numpy()

    def of(p: np.ndarray) -> float:
        d = [p[t] - reference[t] for t in range(T)]
        return sum(
            w * 0.3 * (x * x / 2 if estimator == "k2" else math.exp(-x) - 1 + x)
            for w, x in zip(INPUTS["weights"], d, strict=True)
        )

    (with_it, slope), (without, plain) = run(0.3), run(0.0)
    assert with_it - without == pytest.approx(of(P), rel=1e-9)
    numeric = [(of(P + 1e-6 * e) - of(P - 1e-6 * e)) / 2e-6 for e in np.eye(T)]
    np.testing.assert_allclose(slope - plain, numeric, rtol=1e-6, atol=1e-8)


def test_the_divergence_is_ignored_where_weights_are_zero():
    entry = losses.find("ppo")
    predicted = torch.tensor([-120.0, -1.0], requires_grad=True)
    inputs = {name: torch.zeros(2) for name in ("logprobs", "advantages", "reference_logprobs")} | {
        "weights": torch.tensor([0.0, 1.0])
    }
    terms = entry.terms(TorchOps([2]), predicted, inputs, entry.checked({"kl_coef": 1.0}).config)
    (slope,) = torch.autograd.grad(terms.elementwise.sum(), predicted)
    assert (
        bool(torch.isfinite(slope).all())
        and float(slope[0]) == 0.0
        and float(terms.elementwise[1].detach()) == pytest.approx(math.e - 2)
    )


def test_tokens_of_weight_zero_do_not_count_as_clipped():
    inputs = {name: torch.zeros(2) for name in ("logprobs",)} | {
        "advantages": torch.ones(2),
        "weights": torch.tensor([0.0, 1.0]),
    }
    inputs["sequence_ratio_mask"] = torch.ones(2)
    for name in ("ppo", "cispo", "dppo", "gspo"):
        entry = losses.find(name)
        own = {key: inputs[key] for key in (*entry.required, *entry.optional)}
        options = {"cispo": {"clip_high_threshold": 1.1}, "dppo": {"delta_high": 0.1}}.get(name, {})
        predicted = torch.tensor([2.0, 2.0]) if name != "dppo" else torch.tensor([0.5, 0.5])
        assert (
            entry.terms(TorchOps([2]), predicted, own, entry.checked(options).config).sums[
                "clipped_tokens:sum"
            ]
            == 1
        ), name


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (
            {"kl_coef": 0.1},
            {"weights": [1, 1]},
            "needs loss_fn_inputs reference_logprobs: weights select",
        ),
        ({"kl_coef": 0.1}, {"reference_logprobs": [0, 0]}, "needs loss_fn_inputs weights"),
        ({}, {"reference_logprobs": [0, 0]}, "only used with kl_coef above 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, {}, "kl_estimator is 'k1'; allowed: k2, k3"),
    ],
)
def test_the_divergence_requires_its_inputs(config, more, message):
    entry = losses.find("ppo")
    fields = {"target_tokens": [1, 2], "logprobs": [0, 0], "advantages": [0, 0], **more}
    with pytest.raises(InvalidRequest, match=message):
        losses.check_inputs(entry, entry.checked(config), "policy", columns(**fields), False)


def test_names_and_options_are_checked():
    with pytest.raises(
        InvalidRequest,
        match="unknown loss 'nope'; available: cispo, cross_entropy, custom, dppo, dro, gspo, "
        "importance_sampling, ppo, ppo_critic",
    ):
        losses.find("nope")
    with pytest.raises(InvalidRequest, match="importance_sampling is the closest"):
        losses.find("stable_reinforce")
    with pytest.raises(
        InvalidRequest,
        match="has no option 'clip'; its options: clip_low_threshold, clip_high_threshold",
    ):
        losses.find("ppo").checked({"clip": 1.0})
    with pytest.raises(InvalidRequest, match="it must be a finite number"):
        losses.find("ppo").checked({"clip_low_threshold": math.nan})
    with pytest.raises(InvalidRequest, match="it must be a finite number"):
        losses.find("ppo").checked({"clip_low_threshold": "x"})


def test_the_reference_page_matches_the_registry():
    shown = (Path(__file__).parent.parent.parent / "docs" / "reference" / "losses.md").read_text()
    assert shown == markdown(), (
        "generate it again: python -m skyrl_actors.losses.loss_reference > docs/reference/losses.md"
    )
