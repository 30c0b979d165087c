"""GSPO, token variant (Zheng et al., 2025, arXiv:2507.18071): −Σ min(s·A, clip(s, low, high)·A).

s is the ratio of whole sequences, exp(mean of p − q over a datum's masked tokens). It is the same
number for each token of the datum, but its gradient is that of the token. `sequence_ratio_mask` is
1 for tokens of the sampled sequence. Other tokens do not count.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss

SEQUENCE_RATIO_MASK = "sequence_ratio_mask"


@loss(
    "gspo",
    role="policy",
    required=("logprobs", "advantages", SEQUENCE_RATIO_MASK),
    optional={"weights": 1.0},
)
def gspo(
    ops: Ops,
    logprobs: Array,
    inputs: Mapping[str, Array],
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> LossTerms:
    """Return the loss of each token, and the number of clipped tokens."""
    mask, advantages = inputs[SEQUENCE_RATIO_MASK], inputs["advantages"]
    drift = ops.row_mean(ops.detach(logprobs) - inputs["logprobs"], mask)
    ratio = ops.exp(drift + logprobs - ops.detach(logprobs))
    plain, clipped = (
        ratio * advantages,
        ops.clip(ratio, clip_low_threshold, clip_high_threshold) * advantages,
    )
    sums = {
        "clipped_tokens:sum": ops.count(
            (clipped < plain) & (mask * inputs["weights"] != 0), like=mask
        )
    }
    return LossTerms(-ops.minimum(plain, clipped) * mask * inputs["weights"], sums)
