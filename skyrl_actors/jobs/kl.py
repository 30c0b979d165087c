"""The divergence from the reference at each token, and its coefficient (pure, in float64)."""

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.algorithms import KlTerm

Floats = NDArray[np.floating]
MAX_CHANGE = 0.2


def estimate(logprobs: Floats, reference: Floats, estimator: str) -> Floats:
    """Return [R] in nats (Schulman, 2020).

    With d = log p − log p_ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d.
    """
    difference = logprobs.astype(np.float64) - reference
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else np.expm1(-difference) + difference


def token_rewards(
    rewards: Floats, logprobs: Floats, reference: Floats, term: KlTerm, coef: float
) -> Floats:
    """Return [R]: rewards − coef · divergence at each token (Ouyang et al., 2022, eq. 2)."""
    return rewards - coef * estimate(logprobs, reference, term.estimator)


class Coefficient:
    """The coefficient of the divergence: constant, or adapted to a target.

    With a target: coef ·= 1 + clip(kl/target − 1, ±0.2) · samples/horizon
    (Ziegler et al., 2019, 2.2).
    """

    def __init__(self, term: KlTerm):
        self._term = term
        self.value = term.coef

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to the divergence (in nats) of a batch of episodes."""
        if self._term.target is None:
            return
        error = float(np.clip(kl / self._term.target - 1, -MAX_CHANGE, MAX_CHANGE))
        self.value *= 1 + error * num_samples / self._term.horizon
