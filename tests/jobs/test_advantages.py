"""Compare the advantage estimators with sums in plain loops, in float64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_actors.config.algorithms import (
    Gae,
    GroupAdvantage,
    LeaveOneOut,
    ReturnAdvantage,
    ReverseKl,
)
from skyrl_actors.jobs import advantages as adv

FLOATS = st.floats(-3, 3, width=32)
RNG = np.random.default_rng(0)
GROUPS = np.asarray([4, 9, 4, 4, 9, 7])
SAMPLED = [np.asarray(m, bool) for m in ([1, 1, 1], [1, 0, 0, 1], [1], [1, 1], [1, 0, 1], [1, 1])]
REWARDS = [RNG.normal(0, 1, len(m)) * m for m in SAMPLED]
VALUES = [RNG.normal(0, 1, len(m)) for m in SAMPLED]
BATCH = adv.Scored(
    rewards=REWARDS,
    groups=GROUPS,
    sampled=SAMPLED,
    values=VALUES,
    logprobs=[v - 1 for v in VALUES],
    reference=[v - 1.5 for v in VALUES],
)


def total(i: int) -> float:
    return sum(float(x) for x in REWARDS[i])


def group_of(i: int) -> list[int]:
    return [j for j in range(len(GROUPS)) if GROUPS[j] == GROUPS[i]]


def whitened(parts: list[list[float]]) -> list[list[float]]:
    """Whiten over the sampled tokens only."""
    own = [
        x
        for part, mask in zip(parts, SAMPLED, strict=True)
        for x, m in zip(part, mask, strict=True)
        if m
    ]
    mean = sum(own) / len(own)
    std = math.sqrt(sum((x - mean) ** 2 for x in own) / len(own))
    return [
        [(x - mean) / (std + 1e-8) if m else 0.0 for x, m in zip(part, mask, strict=True)]
        for part, mask in zip(parts, SAMPLED, strict=True)
    ]


def same(found: list[np.ndarray], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for found_one, expected_one in zip(found, expected, strict=True):
        np.testing.assert_allclose(found_one, expected_one, rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=20),
    st.floats(0.5, 1.0),
    st.floats(0.0, 1.0),
)
def test_gae_is_the_sum_of_discounted_errors(pairs, gamma, lam):
    rewards, values = (np.asarray(x, np.float64) for x in zip(*pairs, strict=True))
    advantages, returns = adv.gae(rewards, values, gamma, lam)
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    for t in range(len(rewards)):
        expected = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(rewards)))
        assert advantages[t] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(returns, advantages + values)


def test_gae_with_lambda_1_and_0():
    rewards, values = np.asarray([0.0, 0.0, 1.0]), np.asarray([0.2, 0.4, 0.6])
    np.testing.assert_allclose(
        adv.gae(rewards, values, 1.0, 1.0)[1], [1, 1, 1]
    )  # Monte Carlo returns
    np.testing.assert_allclose(
        adv.gae(rewards, values, 1.0, 0.0)[0], [0.2, 0.2, 0.4]
    )  # one-step errors


def test_gae_skips_tokens_of_the_environment():
    found = adv.estimate(Gae(gamma=0.9, gae_lambda=0.8, normalize=False), BATCH)
    assert found.returns is not None
    for i, mask in enumerate(SAMPLED):
        own, returns = adv.gae(REWARDS[i][mask], VALUES[i][mask], 0.9, 0.8)
        np.testing.assert_allclose(found.advantages[i][mask], own)
        np.testing.assert_allclose(found.returns[i][mask], returns)
        assert not found.advantages[i][~mask].any()
    white = adv.estimate(Gae(gamma=0.9, gae_lambda=0.8), BATCH).advantages
    same(white, whitened([a.tolist() for a in found.advantages]))


@pytest.mark.parametrize("normalize", [True, False])
def test_group_advantages_compare_with_the_group_mean(normalize: bool):
    expected = []
    for i, mask in enumerate(SAMPLED):
        others = [total(j) for j in group_of(i)]
        mean = sum(others) / len(others)
        value = total(i) - mean
        if normalize and len(others) > 1:
            value /= math.sqrt(sum((x - mean) ** 2 for x in others) / (len(others) - 1)) + 1e-6
        expected.append([value * m for m in mask])
    same(adv.estimate(GroupAdvantage(normalize=normalize), BATCH).advantages, expected)


def test_leave_one_out_compares_with_the_other_answers():
    expected = []
    for i, mask in enumerate(SAMPLED):
        others = [total(j) for j in group_of(i) if j != i]
        value = total(i) - sum(others) / len(others) if others else 0.0
        expected.append([value * m for m in mask])
    same(adv.estimate(LeaveOneOut(), BATCH).advantages, expected)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_returns_are_discounted_sums_of_later_rewards(baseline):
    expected = []
    for i, mask in enumerate(SAMPLED):
        rewards = list(map(float, REWARDS[i]))
        if baseline == "group":
            rewards[-1] -= sum(total(j) for j in group_of(i)) / len(group_of(i))
        own = [r for r, m in zip(rewards, mask, strict=True) if m]
        to_go = iter(
            [sum(0.9 ** (k - t) * own[k] for k in range(t, len(own))) for t in range(len(own))]
        )
        expected.append([next(to_go) if m else 0.0 for m in mask])
    same(
        adv.estimate(ReturnAdvantage(gamma=0.9, baseline=baseline), BATCH).advantages,
        whitened(expected),
    )


def test_reverse_kl_advantage_is_teacher_minus_student_logprob():
    same(
        adv.estimate(ReverseKl(), BATCH).advantages, [[-0.5 * m for m in mask] for mask in SAMPLED]
    )


def test_equal_rewards_give_zero_advantages():
    batch = adv.Scored(
        rewards=[np.asarray([0.0, 1.0])] * 3,
        groups=np.zeros(3, int),
        sampled=[np.ones(2, bool)] * 3,
    )
    for config in (GroupAdvantage(), LeaveOneOut()):
        assert not np.any(adv.estimate(config, batch).advantages)


def test_explained_variance_is_1_for_exact_values_and_0_for_the_mean():
    assert adv.explained_variance(np.asarray([1.0, 2.0]), np.asarray([1.0, 2.0])) == 1
    assert adv.explained_variance(np.asarray([1.5, 1.5]), np.asarray([1.0, 2.0])) == 0
