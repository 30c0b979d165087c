"""Test divergence, reduction, correction and length penalty, and the presets that combine them."""

import math

import numpy as np
import pytest
from pydantic import TypeAdapter

from skyrl_actors.config.algorithms import PRESETS, Correction, NoKl, Overlong, Reduction, RewardKl
from skyrl_actors.config.job import JobConfig, RlConfig
from skyrl_actors.config.load import load, to_yaml
from skyrl_actors.jobs import kl
from skyrl_actors.jobs.metrics import REGISTRY, checked, markdown
from skyrl_actors.jobs.reduction import correction_weights, overlong_penalty, token_weights, varied
from skyrl_actors.messages.errors import ConfigError
from tests.conftest import ROOT

P, REF = np.asarray([-1.0, -2.0, -0.5]), np.asarray([-1.5, -1.0, -0.5])
MASKS = [np.asarray([True, True, False]), np.asarray([True]), np.asarray([False, False])]


@pytest.mark.parametrize(
    ("name", "of"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_estimators_match_their_formulas(name, of):
    np.testing.assert_allclose(
        kl.estimate(P, REF, name),
        [of(p - r) for p, r in zip(P, REF, strict=True)],
        rtol=1e-12,
        atol=1e-15,
    )


def test_expected_estimates_equal_the_exact_divergence():
    """The expected values of k1 and k3, summed over a vocabulary, equal the exact divergence."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    for name in ("k1", "k3"):
        assert float(np.sum(p * kl.estimate(np.log(p), np.log(q), name))) == pytest.approx(
            exact, rel=1e-9
        )


def test_token_rewards_subtract_the_divergence():
    np.testing.assert_allclose(
        kl.token_rewards(np.asarray([0, 0, 1.0]), P, REF, "k1", 0.1), [-0.05, 0.1, 1.0]
    )


def test_the_coefficient_adapts_to_its_target_within_bounds():
    adaptive = kl.Coefficient(RewardKl(coef=0.1, target=0.01))
    adaptive.update(1.0, 1000)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    adaptive.update(0.009, 1000)
    assert adaptive.value == pytest.approx(0.102 * (1 - 0.1 * 0.1))
    constant = kl.Coefficient(RewardKl(coef=0.1))
    constant.update(5.0, 100)
    assert constant.value == 0.1


def test_reductions_give_the_named_means():
    token, sequence, fixed = (
        token_weights(Reduction(type=t), MASKS, 10)
        for t in ("token_mean", "sequence_mean", "fixed")
    )
    np.testing.assert_allclose(np.concatenate(token), [1 / 3, 1 / 3, 0, 1 / 3, 0, 0])
    np.testing.assert_allclose(np.concatenate(sequence), [1 / 4, 1 / 4, 0, 1 / 2, 0, 0])
    np.testing.assert_allclose(np.concatenate(fixed), [1 / 20, 1 / 20, 0, 1 / 20, 0, 0])


def test_corrections_truncate_or_mask_the_ratio():
    ours, theirs = [np.asarray([-1.0, -1.0, -3.0])], [np.asarray([-2.0, -1.0, 0.0])]
    masks = [np.asarray([True, True, False])]

    def of(**config) -> list[float]:
        chosen = TypeAdapter[Correction](Correction).validate_python({"type": "none"} | config)
        return correction_weights(chosen, ours, theirs, masks)[0].tolist()

    assert of() == [1, 1, 1]
    assert of(type="truncated", high=2.0) == pytest.approx([2.0, 1, 1])
    assert of(type="masked", high=2.0) == pytest.approx([0, 1, 1])
    assert of(type="masked", high=3.0)[0] == pytest.approx(math.e)
    assert of(type="truncated", level="sequence", high=3.0)[:2] == pytest.approx(
        [math.exp(0.5)] * 2
    )


def test_long_answers_are_penalized():
    config = Overlong(buffer_tokens=4)
    assert [overlong_penalty(config, n, 10) for n in (1, 6, 8, 10)] == [0, 0, -0.5, -1]
    assert overlong_penalty(Overlong(), 10, 10) == 0


def test_varied_finds_groups_with_different_rewards():
    assert varied(np.asarray([1.0, 1.0, 0.0, 1.0, 0.0]), np.asarray([3, 3, 5, 5, 8])) == {5}


TEACHER = {"reference": {"type": "checkpoint", "path": "runs/x/checkpoint"}}


def job(**given) -> JobConfig:
    if given.get("type") == "distill":
        given |= TEACHER
    return JobConfig.model_validate(
        {"cluster": {"critic": {}, "policy": {}, "base_model": {"type": "tiny"}}, "job": given}
    )


@pytest.mark.parametrize("name", PRESETS)
def test_each_part_of_a_preset_can_be_replaced(name, tmp_path):
    made = job(type=name).job
    assert isinstance(made, RlConfig)
    for part, content in PRESETS[name].items():
        assert {key: value for key, value in getattr(made, part) if key in content} == content
    changed = job(
        type=name, policy_loss={"type": "dppo", "delta_high": 0.3}, reduction={"type": "fixed"}
    ).job
    assert (
        isinstance(changed, RlConfig)
        and changed.policy_loss.type == "dppo"
        and changed.reduction.type == "fixed"
    )
    assert changed.advantage == made.advantage
    (tmp_path / "c.yaml").write_text(to_yaml(job(type=name)))
    assert load(tmp_path / "c.yaml", (), JobConfig).job == job(type=name).job


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline", "dr_grpo"])
def test_a_kl_penalty_in_another_place_has_the_estimator_of_that_place(name):
    made = job(type=name, kl={"place": "reward", "coef": 0.02}).job
    assert isinstance(made, RlConfig)
    assert made.kl == RewardKl(coef=0.02) and made.kl.estimator == "k1"


def test_a_kl_penalty_in_the_loss_needs_no_estimator():
    made = job(type="rloo", kl={"place": "loss", "coef": 0.02}).job
    assert isinstance(made, RlConfig)
    assert made.kl.place == "loss" and made.kl.estimator != "k1"
    own = job(type="grpo", kl={"place": "reward", "coef": 0.02, "estimator": "k3"}).job
    assert isinstance(own, RlConfig) and own.kl.estimator == "k3"


def test_single_values_of_a_preset_can_be_changed():
    made = job(type="dapo", policy_loss={"clip_low_threshold": 0.7}).job
    assert isinstance(made, RlConfig)
    assert dict(made.policy_loss) == {
        "type": "ppo",
        "clip_low_threshold": 0.7,
        "clip_high_threshold": 1.28,
        "dual_clip": None,
        "log_ratio_limit": None,
    }
    assert (made.overlong.buffer_tokens, made.overlong.cut_answers) == (
        2,
        "score",
    )  # a fifth of max_tokens
    longer = job(type="dapo", max_tokens=400, overlong={"cut_answers": "mask"}).job
    assert isinstance(longer, RlConfig) and (
        longer.overlong.buffer_tokens,
        longer.overlong.cut_answers,
    ) == (80, "mask")
    for name in ("ppo", "grpo"):  # one key turns the divergence off
        off = job(type=name, kl={"place": "none"}).job
        assert isinstance(off, RlConfig) and off.kl == NoKl()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("job.type=grp", r"job\.type: 'grp' is not known; did you mean grpo\? allowed: ppo, grpo"),
        (
            "job.samples_per_prompt=1",
            "compares the answers to one prompt: set samples_per_prompt to 2",
        ),
        ("job.kl.estimator=k1", "estimator k1 has no gradient .* use k2 or k3"),
        ("job.kl.coef=0", "coef: Input should be greater than 0"),
        ("job.kl={place: none, coef: 0.1}", r"kl\.coef: unknown key; allowed here: place"),
        ("job.kl.horizon=5", r"kl\.horizon: this key was removed; it is 10,000"),
        ("job.correction.high=3", "correction: set type to one of none, truncated, masked"),
        ("job.filter.max_batches=3", "filter: set type to one of none, varied"),
        ("job.overlong.penalty=2", "overlong.penalty: this key was removed; it is 1"),
        ("job.critic_lr=0.1", "critic_lr do nothing without a critic"),
        ("job.max_tokens=512", "leaves no tokens for a prompt"),
        ("job.samples_per_prompt=100000", "is above cluster.limits.samples_in_flight"),
        ("job.seed=-1", "greater than or equal to 0"),
        ("job.lora_rank=0", "greater than or equal to 1"),
        ("job.type=distill", "set reference.type to checkpoint"),
        (
            "job.kl.cof=1",
            r"job.kl.coef\? allowed here: coef, estimator, place, target",
        ),
        ("job.overlong.buffer_tokens=99", "buffer_tokens 99 is above max_tokens 12"),
        ("job.reference.type=checkpoint", r"reference\.path: Field required"),
        ("job.advantage.type=gae", "grpo needs a critic group: set cluster.critic"),
        (
            "job={type: ppo, critic_warmup: 40}",
            "the policy would never learn: critic_warmup 40 takes all of 40 iterations",
        ),
        (
            "job.env={type: reverse, max_turns: 3}",
            r"env\.max_turns: unknown key",
        ),
        (
            "run={checkpoint_every: 0, keep_checkpoints: 9}",
            "keep_checkpoints does nothing while checkpoint_every is 0",
        ),
        (
            "cluster.journal.url=postgresql://ann:word@host/db",
            "a job's journal exists only while it runs",
        ),
        ("job.lora_rank=64", "job.lora_rank 64 is above cluster.lora.max_rank 32"),
    ],
)
def test_impossible_configs_are_refused_before_anything_starts(override, message):
    with pytest.raises(ConfigError, match=message):
        load(ROOT / "configs/jobs/grpo_tiny.yaml", [override], JobConfig)


def test_every_metric_has_a_definition_and_is_in_the_docs():
    assert (ROOT / "docs/reference/job_metrics.md").read_text() == markdown(), (
        "generate it again: python -m skyrl_actors.jobs.metrics > docs/reference/job_metrics.md"
    )
    assert all(m.definition and m.unit and m.reduction for m in REGISTRY.values())
    with pytest.raises(KeyError, match="rewards"):
        checked({"reward": 1.0, "rewards": 1.0})
