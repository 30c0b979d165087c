"""Policy gradient corrected for the sampler's distribution: −Σ exp(p − q)·A.

p are the current logprobs and q the logprobs at sampling time.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, log_ratio, loss


@loss(
    "importance_sampling",
    role="policy",
    required=("logprobs", "advantages"),
    optional={"weights": 1.0},
)
def importance_sampling(
    ops: Ops, logprobs: Array, inputs: Mapping[str, Array], *, log_ratio_limit: float = 0.0
) -> LossTerms:
    """Return the loss of each token. The ratio is not bounded without `log_ratio_limit`."""
    ratio = ops.exp(log_ratio(ops, logprobs, inputs["logprobs"], log_ratio_limit))
    return LossTerms(-ratio * inputs["advantages"] * inputs["weights"], {})
