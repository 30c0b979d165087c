"""Policy gradient corrected for the sampler's distribution: −Σ exp(p − q)·A, p current and q sampling logprobs."""

from collections.abc import Mapping

from skyrl_actors.losses.base import Array, LossTerms, Ops, loss


@loss("importance_sampling", role="policy", required=("logprobs", "advantages"), optional={"weights": 1.0})
def importance_sampling(ops: Ops, logprobs: Array, inputs: Mapping[str, Array]) -> LossTerms:
    ratio = ops.exp(logprobs - inputs["logprobs"])
    return LossTerms(-ratio * inputs["advantages"] * inputs["weights"], {})
