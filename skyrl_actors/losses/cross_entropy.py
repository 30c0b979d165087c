"""Weighted negative log-likelihood: −Σ w·log p(target).

Weights are real numbers and can be negative.
With targets and weights of shape (N, K), the sum also includes the K targets of each position.
This is the cross-entropy to a teacher's distribution (Hinton et al., 2015, arXiv:1503.02531).
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss


@loss("cross_entropy", role="policy", required=(), optional={"weights": 1.0}, many_targets=True)
def cross_entropy(ops: Ops, logprobs: Array, inputs: Mapping[str, Array]) -> LossTerms:
    """Return the loss of each target, in the shape of the targets."""
    return LossTerms(-inputs["weights"] * logprobs, {})
