"""Token rewards, generalized advantage estimation and their statistics (pure, float64 inside)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


def token_rewards(reward: float, logprobs: Floats, reference: Floats, kl_coef: float) -> Floats:
    """[R]: −kl_coef·(log p − log p_ref) at each token, plus the task's reward at the last (Ouyang et al., 2022)."""
    rewards = -kl_coef * (logprobs.astype(np.float64) - reference)
    rewards[-1] += reward
    return rewards


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns [R] of one finished answer (Schulman et al., 2016, eq. 16; the value after the end is 0).

    A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V_{t+1} − V_t;  returns are A + V.
    """
    advantages = np.zeros(len(rewards), np.float64)
    following, next_value = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * next_value - values[t]
        following = delta + gamma * lam * following
        advantages[t], next_value = following, float(values[t])
    return advantages, advantages + values


def whiten(parts: Sequence[Floats]) -> list[Floats]:
    """Shift and scale all tokens of a batch to mean 0 and standard deviation 1."""
    joined = np.concatenate(parts)
    mean, std = joined.mean(), joined.std()
    return [(part - mean) / (std + 1e-8) for part in parts]


def kl_estimate(logprobs: Floats, reference: Floats) -> float:
    """Mean of the k3 estimator, exp(−d) − 1 + d with d = log p − log p_ref: never negative (Schulman, 2020)."""
    difference = logprobs.astype(np.float64) - reference
    return float(np.mean(np.exp(-difference) - 1 + difference))


def explained_variance(values: Floats, returns: Floats) -> float:
    """1 − Var(R − V) / Var(R): 1 = the critic knows the returns, 0 = no better than their mean."""
    spread = float(np.var(returns))
    return 0.0 if spread == 0 else 1 - float(np.var(returns.astype(np.float64) - values)) / spread
