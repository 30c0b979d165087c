"""Advantage estimators, pure functions that compute in float64.

Arrays [R] hold one value for each token of an answer. Tokens that were not sampled get advantage 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.algorithms import (
    Advantage,
    Gae,
    GroupAdvantage,
    LeaveOneOut,
    ReturnAdvantage,
)

Floats = NDArray[np.floating]
EPS = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The input of the estimators: each list holds one array [R] for each of N answers."""

    rewards: Sequence[Floats]  # at each token, with the KL penalty if it is part of the reward
    groups: NDArray[np.integer]  # [N]: answers to one prompt share a number
    sampled: Sequence[NDArray[np.bool_]]  # False for tokens that the environment wrote
    values: Sequence[Floats] | None = None
    logprobs: Sequence[Floats] | None = None
    reference: Sequence[Floats] | None = None


@dataclass(frozen=True, slots=True)
class Estimates:
    """The output of an estimator: one array [R] for each answer."""

    advantages: list[Floats]
    returns: list[Floats] | None = None  # the target of a critic


def estimate(config: Advantage, batch: Scored) -> Estimates:
    """Compute advantages with the configured estimator, and returns if it uses a critic."""
    if isinstance(config, Gae):
        return _gae(config, batch)
    if isinstance(config, GroupAdvantage):
        return Estimates(
            _broadcast(group_advantages(_totals(batch), batch.groups, config.normalize), batch)
        )
    if isinstance(config, LeaveOneOut):
        return Estimates(_broadcast(leave_one_out(_totals(batch), batch.groups), batch))
    if isinstance(config, ReturnAdvantage):
        return Estimates(_returns(config, batch))
    assert batch.logprobs is not None and batch.reference is not None
    gaps = zip(batch.logprobs, batch.reference, batch.sampled, strict=True)
    return Estimates([np.where(s, np.asarray(ref, np.float64) - p, 0.0) for p, ref, s in gaps])


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Return advantages and returns [R] of one finished answer (Schulman et al., 2016, eq. 16).

    A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V_{t+1} − V_t;  returns are A + V.
    The value after the end is 0.
    """
    advantages = np.zeros(len(rewards), np.float64)
    following, next_value = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * next_value - values[t]
        following = delta + gamma * lam * following
        advantages[t], next_value = following, float(values[t])
    return advantages, advantages + values


def group_advantages(totals: Floats, groups: NDArray[np.integer], by_std: bool) -> Floats:
    """Return [N]: (r − group mean) / group standard deviation (Shao et al., 2024, 4.1.2).

    The standard deviation has n − 1 in the denominator. Without by_std there is no division
    (Dr. GRPO). If all rewards of a group are equal, its advantages are 0.
    """
    found = np.zeros(len(totals), np.float64)
    for group in np.unique(groups):
        own = groups == group
        rewards = totals[own]
        found[own] = rewards - rewards.mean()
        if by_std and len(rewards) > 1:
            found[own] /= rewards.std(ddof=1) + 1e-6
    return found


def leave_one_out(totals: Floats, groups: NDArray[np.integer]) -> Floats:
    """Return [N]: r_i − the mean of the other rewards of its group.

    The only answer of a group has advantage 0 (Ahmadian et al., 2024, eq. 9).
    """
    found = np.zeros(len(totals), np.float64)
    for group in np.unique(groups):
        own = groups == group
        rewards = totals[own]
        if len(rewards) > 1:
            found[own] = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return found


def rewards_to_go(rewards: Floats, gamma: float) -> Floats:
    """Return [R]: Σ_k γ^k r_{t+k}."""
    found, following = np.zeros(len(rewards), np.float64), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        found[t] = following = rewards[t] + gamma * following
    return found


def whiten(parts: Sequence[Floats], sampled: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    """Shift and scale all sampled tokens of a batch to mean 0 and standard deviation 1."""
    joined = np.concatenate([part[mask] for part, mask in zip(parts, sampled, strict=True)])
    mean, std = joined.mean(), joined.std()
    return [
        np.where(mask, (part - mean) / (std + EPS), 0.0)
        for part, mask in zip(parts, sampled, strict=True)
    ]


def explained_variance(values: Floats, returns: Floats) -> float:
    """Return 1 − Var(R − V) / Var(R).

    1 means that the values equal the returns. 0 means that they predict no better than the mean.
    """
    spread = float(np.var(returns))
    return 0.0 if spread == 0 else 1 - float(np.var(returns.astype(np.float64) - values)) / spread


def _totals(batch: Scored) -> Floats:
    return np.asarray([float(np.sum(rewards)) for rewards in batch.rewards])


def _broadcast(per_answer: Floats, batch: Scored) -> list[Floats]:
    return [
        np.where(mask, advantage, 0.0)
        for advantage, mask in zip(per_answer, batch.sampled, strict=True)
    ]


def _gae(config: Gae, batch: Scored) -> Estimates:
    assert batch.values is not None, "GAE needs the values of a critic"
    advantages, returns = list[Floats](), list[Floats]()
    for rewards, values, mask in zip(batch.rewards, batch.values, batch.sampled, strict=True):
        own_advantages, own_returns = gae(
            rewards[mask], values[mask], config.gamma, config.gae_lambda
        )
        advantages.append(_spread(own_advantages, mask))
        returns.append(_spread(own_returns, mask))
    return Estimates(whiten(advantages, batch.sampled) if config.normalize else advantages, returns)


def _returns(config: ReturnAdvantage, batch: Scored) -> list[Floats]:
    rewards = list(batch.rewards)
    if config.baseline == "group":
        shifts = group_advantages(_totals(batch), batch.groups, by_std=False) - _totals(batch)
        # The baseline is subtracted at the last token, because the task's reward is there.
        rewards = [
            r + shift * (np.arange(len(r)) == len(r) - 1)
            for r, shift in zip(rewards, shifts, strict=True)
        ]
    spread = [
        _spread(rewards_to_go(r[mask], config.gamma), mask)
        for r, mask in zip(rewards, batch.sampled, strict=True)
    ]
    return whiten(spread, batch.sampled)


def _spread(values: Floats, mask: NDArray[np.bool_]) -> Floats:
    found = np.zeros(len(mask), np.float64)
    found[mask] = values
    return found
