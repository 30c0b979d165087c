"""The clipped surrogate of PPO: −Σ min(r·A, clip(r, low, high)·A), r = exp(p − q).

This is eq. 7 of Schulman et al., 2017. The thresholds bound the ratio itself: 0.8 and 1.2 are
1 − ε and 1 + ε with ε = 0.2.

With `dual_clip` c, a token with a negative advantage counts with at least c·A (Ye et al., 2020,
arXiv:1912.09729, eq. 5): the minimum alone is not bounded there when the ratio is large.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, log_ratio, loss


@loss("ppo", role="policy", required=("logprobs", "advantages"), optional={"weights": 1.0})
def ppo(
    ops: Ops,
    logprobs: Array,
    inputs: Mapping[str, Array],
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip: float = 0.0,
    log_ratio_limit: float = 0.0,
) -> LossTerms:
    """Return the loss of each token, and the number of clipped tokens."""
    advantages, weights = inputs["advantages"], inputs["weights"]
    ratio = ops.exp(log_ratio(ops, logprobs, inputs["logprobs"], log_ratio_limit))
    plain = ratio * advantages
    clipped = ops.clip(ratio, clip_low_threshold, clip_high_threshold) * advantages
    objective = ops.minimum(plain, clipped)
    is_clipped = clipped < plain
    if dual_clip:
        least = ops.where(advantages < 0, dual_clip * advantages, objective)
        is_clipped = is_clipped | (objective < least)
        objective = ops.maximum(objective, least)
    count = ops.count(is_clipped & (weights != 0), like=weights)
    return LossTerms(-objective * weights, {"clipped_tokens:sum": count})
