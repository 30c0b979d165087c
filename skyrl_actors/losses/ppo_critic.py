"""The clipped value loss: Σ ½·max((V − R)², (clip(V, V_old ± value_clip) − R)²).

The PPO reference code has the same loss. Positions with weight 0 (prompts) do not count.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss


@loss("ppo_critic", role="critic", required=("values", "returns"), optional={"weights": 1.0})
def ppo_critic(
    ops: Ops, values: Array, inputs: Mapping[str, Array], *, value_clip: float = 0.2
) -> LossTerms:
    """Return the loss of each value, the number of clipped ones, and the sum of (V − R)²."""
    returns, weights = inputs["returns"], inputs["weights"]
    bounded = ops.clip_around(values, inputs["values"], value_clip)
    plain, clipped = (values - returns) ** 2, (bounded - returns) ** 2
    sums = {
        "clipped_values:sum": ops.count((clipped > plain) & (weights != 0), like=weights),
        "squared_error:sum": (ops.detach(plain) * (weights != 0)).sum(),
    }
    return LossTerms(0.5 * ops.maximum(plain, clipped) * weights, sums)
