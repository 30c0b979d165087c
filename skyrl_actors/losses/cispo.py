"""CISPO (MiniMax-M1, arXiv:2506.13585): −Σ stopgrad(clip(r, low, high))·p·A, r = exp(p − q).

Unlike in PPO, a clipped token keeps its gradient. Only its weight is bounded.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss


@loss("cispo", role="policy", required=("logprobs", "advantages"), optional={"weights": 1.0})
def cispo(
    ops: Ops,
    logprobs: Array,
    inputs: Mapping[str, Array],
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> LossTerms:
    """Return the loss of each token, and the number of tokens with a bounded weight."""
    ratio = ops.detach(ops.exp(logprobs - inputs["logprobs"]))
    weight = ops.clip(ratio, clip_low_threshold, clip_high_threshold)
    sums = {
        "clipped_tokens:sum": ops.count((weight != ratio) & (inputs["weights"] != 0), like=ratio)
    }
    return LossTerms(-weight * logprobs * inputs["advantages"] * inputs["weights"], sums)
