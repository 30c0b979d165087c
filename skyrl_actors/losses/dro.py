"""Direct reward optimisation: −Σ (p·A − ½·beta·(p − q)²).

Source: Richemond et al., 2024, arXiv:2405.19107.
"""

from collections.abc import Mapping

from skyrl_actors.losses.loss import Array, LossTerms, Ops, loss


@loss("dro", role="policy", required=("logprobs", "advantages"), optional={"weights": 1.0})
def dro(ops: Ops, logprobs: Array, inputs: Mapping[str, Array], *, beta: float = 0.05) -> LossTerms:
    """Return the loss of each token. `beta` weights the distance to the sampling policy."""
    drift = logprobs - inputs["logprobs"]
    return LossTerms(
        -(logprobs * inputs["advantages"] - 0.5 * beta * drift**2) * inputs["weights"], {}
    )
