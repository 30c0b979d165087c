"""DPPO with binary total variation (Qi et al., 2026, arXiv:2602.04879): −Σ M·r·A, r = exp(p − q).

M is 0 where the update would move further out of the trust region: A > 0 and
e^p − e^q > delta_high, or A < 0 and e^q − e^p > delta_low. Otherwise M is 1. The bound applies
to the probability of the sampled token, not to its ratio.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, log_ratio, loss


@loss("dppo", role="policy", required=("logprobs", "advantages"), optional={"weights": 1.0})
def dppo(
    ops: Ops,
    logprobs: Array,
    inputs: Mapping[str, Array],
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    log_ratio_limit: float = 0.0,
) -> LossTerms:
    """Return the loss of each token, and the number of tokens with M = 0."""
    advantages = inputs["advantages"]
    moved = ops.detach(ops.exp(logprobs)) - ops.exp(inputs["logprobs"])
    outside = ((advantages > 0) & (moved > delta_high)) | ((advantages < 0) & (moved < -delta_low))
    ratio = ops.exp(log_ratio(ops, logprobs, inputs["logprobs"], log_ratio_limit))
    kept = ops.where(outside, ratio * 0.0, ratio)
    return LossTerms(
        -kept * advantages * inputs["weights"],
        {"clipped_tokens:sum": ops.count(outside & (inputs["weights"] != 0), like=advantages)},
    )
