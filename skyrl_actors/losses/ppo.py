"""The clipped surrogate of PPO: −Σ min(r·A, clip(r, low, high)·A), r = exp(p − q).

This is eq. 7 of Schulman et al., 2017. The thresholds bound the ratio itself: 0.8 and 1.2 are
1 − ε and 1 + ε with ε = 0.2.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss


@loss("ppo", role="policy", required=("logprobs", "advantages"), optional={"weights": 1.0})
def ppo(
    ops: Ops,
    logprobs: Array,
    inputs: Mapping[str, Array],
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> LossTerms:
    """Return the loss of each token, and the number of clipped tokens."""
    advantages, weights = inputs["advantages"], inputs["weights"]
    ratio = ops.exp(logprobs - inputs["logprobs"])
    plain = ratio * advantages
    clipped = ops.clip(ratio, clip_low_threshold, clip_high_threshold) * advantages
    objective = ops.minimum(plain, clipped)
    is_clipped = ops.count((clipped < plain) & (weights != 0), like=weights)
    return LossTerms(-objective * weights, {"clipped_tokens:sum": is_clipped})
