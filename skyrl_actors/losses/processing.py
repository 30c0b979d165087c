"""The sampling distribution as options of a loss: temperature, top_k and top_p.

Samples come from softmax(logits / temperature), restricted by top_k and then by top_p. With these
options, a policy's log-probabilities and entropies are those of that distribution. With
`processed_logprobs` of the engine, every importance ratio is then 1 on policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_actors.messages.errors import InvalidRequest

OPTIONS: dict[str, float | str] = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0}
"""The options of every policy loss, with the values that change nothing. A top_k of −1 is off too.

Tokens outside of top_k and top_p have no probability and no gradient. The target of a position is
never left out, so its log-probability is finite. Which tokens are left out has no gradient.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processing:
    """How logits become the distribution that samples come from."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens can have no probability."""
        return self.top_k > 0 or self.top_p < 1


def processing_of(config: Mapping[str, float | str]) -> Processing | None:
    """Return the processing that a loss asks for, or None if it changes nothing."""
    found = Processing(
        temperature=float(config.get("temperature", 1.0)),
        top_k=max(0, int(config.get("top_k", 0))),
        top_p=float(config.get("top_p", 1.0)),
    )
    return None if found == Processing() else found


def check(name: str, config: Mapping[str, float | str], many_targets: bool) -> None:
    """Check the options. `many_targets` is true for inputs of shape (N, K).

    Raises:
        InvalidRequest: A value has no meaning, or top_k or top_p meets several targets a token.
    """
    temperature, top_k, top_p = (float(config.get(key, OPTIONS[key])) for key in OPTIONS)
    if temperature <= 0:
        raise InvalidRequest(
            f"loss {name}: temperature is {temperature:g}; it must be above 0, 1 for no change"
        )
    if top_k != int(top_k) or top_k < -1:
        raise InvalidRequest(
            f"loss {name}: top_k is {top_k:g}; it must be a number of tokens, 0 for all"
        )
    if not 0 < top_p <= 1:
        raise InvalidRequest(
            f"loss {name}: top_p is {top_p:g}; it must be above 0 and at most 1, 1 for all tokens"
        )
    if many_targets and (top_k > 0 or top_p < 1):
        raise InvalidRequest(
            f"loss {name}: top_k and top_p need one target for each token, not the shape (N, K)"
        )
