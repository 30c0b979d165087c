"""Weighted negative log-likelihood: −Σ w·log p(target). Weights are real-valued and may be negative."""

from collections.abc import Mapping

from skyrl_actors.losses.base import Array, LossTerms, Ops, loss


@loss("cross_entropy", role="policy", required=(), optional={"weights": 1.0})
def cross_entropy(ops: Ops, logprobs: Array, inputs: Mapping[str, Array]) -> LossTerms:
    return LossTerms(-inputs["weights"] * logprobs, {})
