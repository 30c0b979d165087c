"""The divergence from the reference at each token, and its coefficient (pure, in float64)."""

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.algorithms import KlTerm, NoKl

Floats = NDArray[np.floating]
MAX_CHANGE = 0.2
HORIZON = 10_000  # samples in which the coefficient can change by a factor of about e^0.2


def estimate(logprobs: Floats, reference: Floats, estimator: str) -> Floats:
    """Return [R] in nats (Schulman, 2020).

    With d = log p − log p_ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d.
    """
    difference = logprobs.astype(np.float64) - reference
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else np.expm1(-difference) + difference


def token_rewards(
    rewards: Floats, logprobs: Floats, reference: Floats, estimator: str, coef: float
) -> Floats:
    """Return [R]: rewards − coef · divergence at each token (Ouyang et al., 2022, eq. 2)."""
    return rewards - coef * estimate(logprobs, reference, estimator)


class Coefficient:
    """The coefficient of the divergence: constant, or adapted to a target.

    With a target: coef ·= 1 + clip(kl/target − 1, ±0.2) · samples/HORIZON
    (Ziegler et al., 2019, 2.2).
    """

    def __init__(self, term: KlTerm):
        self._target = None if isinstance(term, NoKl) else term.target
        self.value = 0.0 if isinstance(term, NoKl) else term.coef

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to the divergence (in nats) of a batch of episodes."""
        if self._target is None:
            return
        error = float(np.clip(kl / self._target - 1, -MAX_CHANGE, MAX_CHANGE))
        self.value *= 1 + error * num_samples / HORIZON
