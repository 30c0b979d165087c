"""The divergence from a reference policy as a term of every loss with advantages.

It is estimated at each sampled token (Schulman, "Approximating KL Divergence", 2020). With
d = log π(y) − log π_ref(y) for a token y sampled from π:

- k1 = d is unbiased and may be negative.
- k2 = d²/2 is biased in value, but its expected gradient is that of KL(π ‖ π_ref).
- k3 = exp(−d) − 1 + d is unbiased and never negative.

As a term of the loss, k1 has no gradient in expectation, so only k2 and k3 are allowed there.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from skyrl_actors.messages.errors import InvalidRequest

KL_COEF = "kl_coef"
KL_ESTIMATOR = "kl_estimator"
REFERENCE = "reference_logprobs"
OPTIONS: dict[str, float | str] = {KL_COEF: 0.0, KL_ESTIMATOR: "k3"}
"""The options of this term, with their defaults.

Σ weights · kl_coef · estimate is added to the loss. With a coefficient, the inputs
`reference_logprobs` and `weights` are required.
"""
ESTIMATORS = ("k2", "k3")


class Exp(Protocol):
    """The part of `Ops` that the estimators need."""

    def exp(self, x: Any) -> Any: ...


def estimate(ops: Exp, logprobs: Any, reference: Any, estimator: str) -> Any:
    """Estimate the divergence [T] in nats from logprobs [T] and reference [T]."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    return (
        difference * difference / 2 if estimator == "k2" else ops.exp(-difference) - 1 + difference
    )


def check(name: str, config: Mapping[str, float | str], present: set[str]) -> None:
    """Check the options and inputs of the term. `present` holds the names of the inputs.

    Raises:
        InvalidRequest: The estimator is unknown, an input is missing, or the reference is given
            but not used.
    """
    if config.get(KL_ESTIMATOR, "k3") not in ESTIMATORS:
        raise InvalidRequest(
            f"loss {name}: {KL_ESTIMATOR} is {config[KL_ESTIMATOR]!r}; "
            f"allowed: {', '.join(ESTIMATORS)}"
        )
    wanted = bool(config.get(KL_COEF))
    if wanted and (missing := {REFERENCE, "weights"} - present):
        raise InvalidRequest(
            f"loss {name} with {KL_COEF} needs loss_fn_inputs {', '.join(sorted(missing))}: "
            "weights select the tokens at which the divergence counts"
        )
    if REFERENCE in present and not wanted:
        raise InvalidRequest(f"loss {name}: {REFERENCE} is only used with {KL_COEF} above 0")
